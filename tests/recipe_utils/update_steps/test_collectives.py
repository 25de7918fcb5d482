"""Ranks agree on an update step before any of them starts it, and samples reach the microbatch they are planned for."""

import threading
from functools import partial

import torch.distributed as dist
from distributed_runs import run_distributed

from recipe_utils.parallel.process_group import new_cpu_group
from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.plans.packed import plan_packed
from recipe_utils.plans.rounds import WHOLE, Share
from recipe_utils.update_steps.collectives import (
    AbandonedError,
    OtherRankFailedError,
    RankCounts,
    StepCollectives,
    StepCounts,
)

NAMES = ("target_tokens", "real_tokens", "positions")
OF_RANK = [
    RankCounts(dict(zip(NAMES, (5, 70, 800), strict=True)), 3, 64),
    RankCounts(dict(zip(NAMES, (40, 600, 7000), strict=True)), 2, 32),
]


def count(local, counts_its_data=True, names=NAMES):
    together = StepCollectives(names, counts_its_data, [], dist.group.WORLD, threading.Event())
    try:
        return together.count(local)
    except OtherRankFailedError as error:
        return str(error)


def count_in_several_ways():
    rank = dist.get_rank()
    own = OF_RANK[rank]
    return {
        "both": count(own),
        "only rank 1": count(own, counts_its_data=rank == 1),
        "failed": count(None if rank == 1 else own),
        "after failure": count(own),
        "pairs": count(RankCounts({"pairs": 3 + rank, "other": 7}, 1), names=["pairs"]),
    }


def test_every_rank_gets_the_sums_the_maximum_and_the_least_budget():
    expected = StepCounts(
        {name: sum(of_rank.counts[name] for of_rank in OF_RANK) for name in NAMES},
        max_microbatches=3,
        max_tokens=32,
    )
    of_ranks = run_distributed(count_in_several_ways, 2)
    for found in of_ranks:
        assert found["both"] == found["after failure"] == expected
        # Data that another rank counts adds nothing but its microbatches.
        assert found["only rank 1"] == expected._replace(totals=OF_RANK[1].counts)
        assert found["pairs"].totals == {"pairs": 7}
    assert "rank(s) [1] could not prepare" in of_ranks[0]["failed"]
    assert isinstance(of_ranks[1]["failed"], StepCounts)  # it raises its own error


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


def test_closing_ends_the_wait_for_a_rank_that_never_comes():
    # Fails after 20 s if the abandoned collective keeps a process from ending.
    raised = run_distributed(count_without_the_other_rank, 2, timeout_seconds=20)
    assert raised == [AbandonedError, None]


# ---- Samples ------------------------------------------------------------------------------------


def sample(name, length):
    return {"tokens": [name] * length, "labels": list(range(length))}


def num_tokens(sample):
    return len(sample["tokens"])


def exchange(samples_of_rank, plan, dp_peers_of_rank=None):
    rank = dist.get_rank()
    peers = dp_peers_of_rank[rank] if dp_peers_of_rank else list(range(dist.get_world_size()))
    together = StepCollectives((), True, peers, dist.group.WORLD, threading.Event())
    return together.exchange(samples_of_rank[rank], num_tokens, plan, max_samples=4)


def plan_reversed(lengths, num_ranks):
    positions = range(len(lengths))[::-1]
    of_ranks = [list(positions[rank::num_ranks]) for rank in range(num_ranks)]
    return [[rank[i : i + 2] for i in range(0, len(rank), 2)] for rank in of_ranks]


def names(microbatches):
    return [[sample["tokens"][0] for sample in microbatch] for microbatch, _ in microbatches]


def test_samples_arrive_whole_in_the_order_of_the_plan():
    held = [[sample(0, 3), sample(1, 1), sample(2, 2), sample(3, 4)], [], [sample(4, 5)]]
    got = run_distributed(exchange, 3, held, plan_reversed)
    assert [names(microbatches) for microbatches in got] == [[[4, 1]], [[3, 0]], [[2]]]
    assert got[0] == [([sample(4, 5), sample(1, 1)], WHOLE)]


def test_tensor_parallel_ranks_exchange_with_ranks_of_the_same_coordinate():
    first, second = [sample(0, 9), sample(1, 9)], [sample(2, 1), sample(3, 1)]
    plan = partial(plan_packed, max_tokens_per_microbatch=10, cost=MicrobatchCost())
    held, peers = [first, first, second, second], [[0, 2], [1, 3], [0, 2], [1, 3]]
    got = run_distributed(exchange, 4, held, plan, peers)
    assert got[:2] == [got[0]] * 2
    assert got[2:] == [got[2]] * 2
    assert sorted(names(got[0])[0] + names(got[2])[0]) == [0, 1, 2, 3]
    assert sorted(len(s["tokens"]) for s in got[0][0][0]) == [1, 9]


def test_a_row_of_several_ranks_arrives_on_each_of_them_with_its_share():
    limits = {"max_tokens_per_microbatch": 10, "max_ranks_per_row": 2}
    plan = partial(plan_packed, cost=MicrobatchCost(), **limits)
    got = run_distributed(exchange, 2, [[], [sample(1, 15), sample(2, 5)]], plan)
    assert names(got[0]) == names(got[1]) == [[1, 2]]
    assert [microbatches[0][1] for microbatches in got] == [Share(0, 2), Share(1, 2)]
