"""What all ranks hold is agreed on before any of them starts an update step."""

import threading

import pytest
import torch.distributed as dist
from distributed_runs import run_distributed

from recipe_utils.data.loader.collectives import (
    AbandonedError,
    OtherRankFailedError,
    RankCounts,
    StepCounts,
    count_over_ranks,
)
from recipe_utils.parallel.process_group import new_cpu_group

NAMES = ("target_tokens", "real_tokens", "positions")
OF_RANK = [
    RankCounts(dict(zip(NAMES, (5, 70, 800), strict=True)), 3, clock_ms=90_500, num_skipped=4),
    RankCounts(dict(zip(NAMES, (40, 600, 7000), strict=True)), 2, clock_ms=77_000, num_skipped=5),
]
CLOCK_OF_RANK_0 = 90.5


def count(local, counts_its_data=True, names=NAMES):
    return count_over_ranks(local, names, counts_its_data, dist.group.WORLD, threading.Event())


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
    # Of the names only those that the kind of sample counts, whatever they are.
    pairs = count(RankCounts({"pairs": 3 + rank, "other": 7}, 1), names=["pairs"])
    return both, only_rank_1, with_failure, count(OF_RANK[rank]), asked_to_stop, pairs


@pytest.fixture(scope="module")
def counts_of_two_ranks():
    return run_distributed(count_in_three_ways, 2)


def test_every_rank_learns_the_sums_the_most_microbatches_and_the_time_of_rank_0(
    counts_of_two_ranks,
):
    sums = {name: sum(of_rank.counts[name] for of_rank in OF_RANK) for name in NAMES}
    for both, *_ in counts_of_two_ranks:
        assert both == StepCounts(
            sums, max_microbatches=3, clock_seconds=CLOCK_OF_RANK_0, num_skipped=4 + 5
        )


def test_a_rank_whose_data_another_one_counts_adds_nothing_but_its_microbatches(
    counts_of_two_ranks,
):
    for _, only_rank_1, *_ in counts_of_two_ranks:
        assert only_rank_1 == StepCounts(
            OF_RANK[1].counts, max_microbatches=3, clock_seconds=CLOCK_OF_RANK_0, num_skipped=5
        )


def test_the_other_rank_is_told_which_one_failed(counts_of_two_ranks):
    (_, _, told_rank_0, *_), (_, _, told_rank_1, *_) = counts_of_two_ranks
    assert "rank(s) [1] could not prepare" in told_rank_0
    assert told_rank_1 is None  # it raises its own error


def test_ranks_can_count_on_after_a_failure(counts_of_two_ranks):
    for both, _, _, after_failure, *_ in counts_of_two_ranks:
        assert after_failure == both


def test_all_ranks_learn_that_one_of_them_was_asked_to_stop(counts_of_two_ranks):
    for both, *_, asked_to_stop, _ in counts_of_two_ranks:
        assert not both.stop_requested
        assert asked_to_stop == both._replace(stop_requested=True)


def test_what_is_counted_is_the_callers_own(counts_of_two_ranks):
    for *_, pairs in counts_of_two_ranks:
        assert pairs.totals == {"pairs": 7}


def count_without_the_other_rank():
    group = new_cpu_group(timeout_seconds=600)
    raised = None
    if dist.get_rank() == 0:
        closed = threading.Event()
        threading.Timer(0.2, closed.set).start()
        try:
            count_over_ranks(OF_RANK[0], NAMES, True, group, closed)
        except AbandonedError as error:
            raised = type(error)
    dist.barrier()  # rank 1 is alive all the time and never counts
    return raised


def test_closing_ends_the_wait_for_a_rank_that_never_comes_and_the_processes_end():
    # Fails after 20 s where the abandoned collective keeps a process from ending.
    raised = run_distributed(count_without_the_other_rank, 2, timeout_seconds=20)
    assert raised == [AbandonedError, None]
