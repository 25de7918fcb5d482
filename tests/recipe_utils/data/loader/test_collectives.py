"""Ranks agree on an update step before any of them starts it, and samples reach the microbatch they are planned for."""

import threading
from functools import partial

import pytest
import torch.distributed as dist
from distributed_runs import run_distributed

from recipe_utils.data.loader.collectives import (
    AbandonedError,
    OtherRankFailedError,
    RankCounts,
    StepCollectives,
    StepCounts,
    group_samples,
)
from recipe_utils.data.loader.plan import plan_packed
from recipe_utils.parallel.process_group import new_cpu_group

NAMES = ("target_tokens", "real_tokens", "positions")
OF_RANK = [
    RankCounts(dict(zip(NAMES, (5, 70, 800), strict=True)), 3, clock_ms=90_500, num_skipped=4),
    RankCounts(dict(zip(NAMES, (40, 600, 7000), strict=True)), 2, clock_ms=77_000, num_skipped=5),
]
CLOCK_OF_RANK_0 = 90.5


def count(local, counts_its_data=True, names=NAMES):
    together = StepCollectives(names, counts_its_data, [], dist.group.WORLD, threading.Event())
    return together.count(local)


def count_in_three_ways():
    rank = dist.get_rank()
    both = count(OF_RANK[rank])
    only_rank_1 = count(OF_RANK[rank], counts_its_data=rank == 1)
    with_failure = None
    try:
        count(None if rank == 1 else OF_RANK[rank])
    except OtherRankFailedError as error:
        with_failure = str(error)
    asked_to_stop = count(OF_RANK[rank]._replace(stop_requested=rank == 1))
    pairs = count(RankCounts({"pairs": 3 + rank, "other": 7}, 1), names=["pairs"])
    return both, only_rank_1, with_failure, count(OF_RANK[rank]), asked_to_stop, pairs


@pytest.fixture(scope="module")
def counts_of_two_ranks():
    return run_distributed(count_in_three_ways, 2)


def test_every_rank_gets_the_sums_the_maximum_and_the_clock_of_rank_0(counts_of_two_ranks):
    expected = StepCounts(
        {name: sum(of_rank.counts[name] for of_rank in OF_RANK) for name in NAMES},
        max_microbatches=3,
        clock_seconds=CLOCK_OF_RANK_0,
        num_skipped=4 + 5,
    )
    for both, only_rank_1, _, after_failure, asked_to_stop, pairs in counts_of_two_ranks:
        assert both == after_failure == expected
        assert asked_to_stop == expected._replace(stop_requested=True)
        # Data that another rank counts adds nothing but its microbatches.
        assert only_rank_1 == expected._replace(totals=OF_RANK[1].counts, num_skipped=5)
        assert pairs.totals == {"pairs": 7}


def test_the_other_rank_is_told_which_one_failed(counts_of_two_ranks):
    on_rank_0, on_rank_1 = (with_failure for _, _, with_failure, *_ in counts_of_two_ranks)
    assert "rank(s) [1] could not prepare" in on_rank_0
    assert on_rank_1 is None  # it raises its own error


def count_without_the_other_rank():
    group = new_cpu_group(timeout_seconds=600)
    raised = None
    if dist.get_rank() == 0:
        closed = threading.Event()
        threading.Timer(0.2, closed.set).start()
        try:
            StepCollectives(NAMES, True, [], group, closed).count(OF_RANK[0])
        except AbandonedError as error:
            raised = type(error)
    dist.barrier()  # rank 1 is alive all the time and never counts
    return raised


def test_closing_ends_the_wait_for_a_rank_that_never_comes_and_the_processes_end():
    # Fails after 20 s where the abandoned collective keeps a process from ending.
    raised = run_distributed(count_without_the_other_rank, 2, timeout_seconds=20)
    assert raised == [AbandonedError, None]


# ---- Samples ------------------------------------------------------------------------------------


def sample(name, length):
    return {"tokens": [name] * length, "labels": list(range(length))}


def num_tokens(sample):
    return len(sample["tokens"])


def exchange(samples_of_rank, plan, dp_peers_of_rank=None, length_of=num_tokens):
    rank = dist.get_rank()
    peers = dp_peers_of_rank[rank] if dp_peers_of_rank else list(range(dist.get_world_size()))
    try:
        together = StepCollectives((), True, peers, dist.group.WORLD, threading.Event())
        return together.exchange(samples_of_rank[rank], length_of, plan, max_samples=4)
    except OtherRankFailedError as error:
        return str(error)


def plan_reversed(lengths, num_ranks):
    """Everything moves: positions in turn, the last first; two to a microbatch."""
    positions = range(len(lengths))[::-1]
    of_ranks = [list(positions[rank::num_ranks]) for rank in range(num_ranks)]
    return [[rank[i : i + 2] for i in range(0, len(rank), 2)] for rank in of_ranks]


def names(microbatches):
    return [[sample["tokens"][0] for sample in microbatch] for microbatch in microbatches]


def test_samples_arrive_whole_in_the_order_of_the_plan():
    held = [[sample(0, 3), sample(1, 1), sample(2, 2), sample(3, 4)], [], [sample(4, 5)]]
    got = run_distributed(exchange, 3, held, plan_reversed)
    assert [names(microbatches) for microbatches in got] == [[[4, 1]], [[3, 0]], [[2]]]
    assert got[0] == [[sample(4, 5), sample(1, 1)]]


def test_tensor_parallel_ranks_exchange_with_their_like():
    """Ranks 0 and 1 hold one coordinate's data, 2 and 3 the other's."""
    first, second = [sample(0, 9), sample(1, 9)], [sample(2, 1), sample(3, 1)]
    plan = partial(plan_packed, max_tokens_per_microbatch=10)
    got = run_distributed(
        exchange, 4, [first, first, second, second], plan, [[0, 2], [1, 3], [0, 2], [1, 3]]
    )
    for rank in (0, 1):
        assert sorted(names(got[rank])[0] + names(got[rank + 2])[0]) == [0, 1, 2, 3]
        assert sorted(len(s["tokens"]) for s in got[rank][0]) == [1, 9]
        assert got[rank] == got[0 if rank < 2 else 2]


def test_a_rank_without_samples_to_give_stops_the_others_by_name():
    got = run_distributed(exchange, 2, [[sample(0, 3)], None], plan_packed)
    assert "rank(s) [1] could not prepare" in got[0]
    assert got[1] == []


def test_a_rank_by_itself_plans_without_any_other():
    samples = [sample(0, 3), sample(1, 1), sample(2, 2)]
    assert names(group_samples(samples, num_tokens, plan_reversed)) == [[2, 1], [0]]


def first_token(sample):
    return sample["tokens"][0]


def plan_by_length(lengths, num_ranks):
    """The samples of each length on a rank of their own."""
    return [[[p for p, n in enumerate(lengths) if n == rank]] for rank in range(num_ranks)]


def test_a_length_is_what_the_collator_returns():
    held = [[sample(0, 3), sample(1, 1)], [sample(1, 4), sample(0, 2)]]
    got = run_distributed(exchange, 2, held, plan_by_length, None, first_token)
    assert [names(microbatches) for microbatches in got] == [[[0, 0]], [[1, 1]]]
    by_token = group_samples(held[0], first_token, lambda lengths, _: [[lengths]])
    assert by_token == [[held[0][0], held[0][1]]]
