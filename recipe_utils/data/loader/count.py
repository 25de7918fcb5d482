"""The one CPU all-reduce per update step: what all ranks hold, agreed before the first forward.

It sums what losses are divided by (target tokens, pairs, images: whatever the kind of sample counts),
and it settles that every rank has the whole update step and how many microbatches each runs. Without that agreement a rank could abandon an
update step half way; with deferred gradient sync that leaves buffers in FSDP2 that ``zero_grad()``
does not see.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

_POLL_SECONDS = 0.0005
_MAX_POLL_SECONDS = 0.008
"""Where a rank is late, the others must not spend its time on asking."""


class RankCounts(NamedTuple):
    """What one rank holds of an update step."""

    counts: Mapping[str, int]
    """By name; the same names, in the same order, on every rank."""
    num_microbatches: int
    stop_requested: bool = False
    """Whether it was asked to stop, say by a signal."""
    clock_ms: int = 0
    """Its monotonic clock [ms]; differences mean something, the value itself does not."""
    num_skipped: int = 0
    """Samples that are in none of its microbatches."""


class StepCounts(NamedTuple):
    """What all ranks together hold of an update step."""

    totals: Mapping[str, int]
    """By name, over the data-parallel ranks."""
    max_microbatches: int
    """Microbatches that every rank must run."""
    stop_requested: bool = False
    """Whether some rank was asked to stop; all do so after the same update step."""
    clock_seconds: float = 0.0
    """Rank 0's clock; what ranks decide by it, they decide alike."""
    num_skipped: int = 0
    """Samples over the data-parallel ranks."""


class OtherRankFailedError(RuntimeError):
    """Another rank could not prepare its part of an update step, so no rank starts it."""


class AbandonedError(RuntimeError):
    """The caller closed the update steps while the ranks were still being counted."""


def count_over_ranks(
    local: RankCounts | None,
    names: Sequence[str],
    counts_its_data: bool,
    group: dist.ProcessGroup | None,
    closed: threading.Event,
) -> StepCounts:
    """Sums an update step's counts over the data-parallel ranks.

    Every rank of ``group`` must call it once per update step, in step order. It is one sum of a
    small table with a row per rank, so each rank also learns the maximum and who failed.

    Args:
        local: this rank's counts; None says that it could not prepare the update step.
        names: of the counts.
        counts_its_data: False on ranks whose data another rank counts already (all but the first of a
            tensor-parallel group).
        group: a CPU (gloo) group of all ranks that nothing else uses.
        closed: once set, the other ranks are no longer waited for.

    Raises:
        AbandonedError: ``closed`` was set first. The group is of no use after that.
        OtherRankFailedError: a rank passed None; names the ranks. Not raised on those ranks
            themselves, who know better what happened: they get the counts of the others.
    """
    row: tuple[int, ...] = ()
    if local is not None:
        counts = [local.num_skipped, *(local.counts[name] for name in names)]
        row = (1, local.num_microbatches, local.stop_requested, local.clock_ms)
        row += tuple(count if counts_its_data else 0 for count in counts)
    table = gather_rows(row, 5 + len(names), group, closed)

    ready, num_microbatches, stop, clock_ms, left_out, *columns = table.unbind(1)
    if local is not None:
        check_all_ready(ready)
    return StepCounts(
        {name: int(column.sum()) for name, column in zip(names, columns, strict=True)},
        int(num_microbatches.max()),
        bool(stop.any()),
        int(clock_ms[0]) / 1000,
        int(left_out.sum()),
    )


def gather_rows(
    row: Sequence[int], width: int, group: dist.ProcessGroup | None, closed: threading.Event
) -> torch.Tensor:
    """Every rank's row of numbers, by one sum of a table in which each fills its own.

    Args:
        row: of this rank, at most ``width`` numbers; zeros follow a shorter one.
        width: the same on all ranks.
        group: a CPU (gloo) group that nothing else uses.
        closed: once set, the other ranks are no longer waited for.

    Returns:
        Shape [ranks, width], int64.

    Raises:
        AbandonedError: ``closed`` was set first.
    """
    table = torch.zeros(dist.get_world_size(group), width, dtype=torch.int64)
    table[dist.get_rank(group), : len(row)] = torch.tensor(row, dtype=torch.int64)
    wait_unless_closed(dist.all_reduce(table, group=group, async_op=True), closed)
    return table


def wait_unless_closed(work: dist.Work | None, closed: threading.Event) -> None:
    """Waits for a collective, but not for ranks that may never come.

    A rank that fails elsewhere closes its update steps. It must not sit in their collectives until
    the group's timeout then, because the other ranks wait for it in a collective of their own.

    Raises:
        AbandonedError: ``closed`` was set first.
    """
    assert work is not None
    pause_seconds = _POLL_SECONDS
    while not work.is_completed():
        if closed.wait(pause_seconds):
            raise AbandonedError("closed while the ranks agreed on an update step")
        pause_seconds = min(2 * pause_seconds, _MAX_POLL_SECONDS)
    work.wait()


def check_all_ready(ready: torch.Tensor) -> None:
    """Checks that no rank has reported a failure.

    Args:
        ready: nonzero for each rank that has its part of the update step, shape [ranks].

    Raises:
        OtherRankFailedError: names the ranks that have not.
    """
    if not ready.all():
        failed = (ready == 0).nonzero().flatten().tolist()
        raise OtherRankFailedError(
            f"rank(s) {failed} could not prepare the next update step, so no rank starts it; the "
            "cause is in their logs"
        )
