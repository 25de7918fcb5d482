"""The one CPU all-reduce per update step: what all ranks hold, agreed before the first forward.

It sums what losses are divided by (target tokens, pairs, images: whatever the kind of sample counts),
and it settles that every rank has the whole update step and how many microbatches each runs. Without that agreement a rank could abandon an
update step half way; with deferred gradient sync that leaves buffers in FSDP2 that ``zero_grad()``
does not see.
"""

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from recipe_utils.data.loader.plan import Plan
from recipe_utils.data.loader.samples import Sample

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


LengthOf = Callable[[Sample], int]
"""A sample's length [tokens]."""


def group_samples(samples: Sequence[Sample], length_of: LengthOf, plan: Plan) -> list[list[Sample]]:
    """The samples of each microbatch, planned for this rank alone."""
    (microbatches,) = plan([length_of(sample) for sample in samples], 1)
    return [[samples[position] for position in microbatch] for microbatch in microbatches]


def exchange_samples(
    samples: Sequence[Sample] | None,
    length_of: LengthOf,
    plan: Plan,
    max_samples: int,
    dp_peers: Sequence[int],
    group: dist.ProcessGroup | None,
    closed: threading.Event,
) -> list[list[Sample]]:
    """Plans one update step over all ranks and sends each sample where it belongs.

    Every rank of ``group`` must call it once per update step, in step order: one sum of a small
    table of lengths and, unless every sample stays where it is, two all-to-alls of bytes.

    Args:
        samples: this rank's; None says that it could not load them.
        length_of: what the plan knows of a sample.
        plan: pure and deterministic.
        max_samples: the most samples a rank has.
        dp_peers: the ranks of ``group`` among which samples move, by data-parallel coordinate; with
            tensor parallelism those of the same coordinate in their group.
        group: a CPU (gloo) group of all ranks that nothing else uses.
        closed: once set, the other ranks are no longer waited for.

    Returns:
        The samples of each of this rank's microbatches; nothing where it passed None.

    Raises:
        recipe_utils.data.loader.collectives.OtherRankFailedError: another rank passed None.
        recipe_utils.data.loader.collectives.AbandonedError: ``closed`` was set first.
    """
    # A row per rank: its number of samples plus one, so that 0 says it failed, and their lengths.
    own: list[int] = []
    if samples is not None:
        own = [len(samples) + 1, *map(length_of, samples)]
    table = gather_rows(own, 1 + max_samples, group, closed)
    if samples is None:
        return []
    check_all_ready(table[:, 0])

    rows = [table[peer].tolist() for peer in dp_peers]
    num_samples = [row[0] - 1 for row in rows]
    lengths = [length for row in rows for length in row[1 : row[0]]]
    owner = [source for source, number in enumerate(num_samples) for _ in range(number)]
    first_of = [sum(num_samples[:source]) for source in range(len(num_samples))]
    planned = plan(lengths, len(dp_peers))
    me = list(dp_peers).index(dist.get_rank(group))
    held = {first_of[me] + i: sample for i, sample in enumerate(samples)}

    moves = [
        [p for microbatch in microbatches for p in microbatch if owner[p] != to]
        for to, microbatches in enumerate(planned)
    ]
    if any(moves):
        outgoing = [b""] * len(table)
        for to, positions in enumerate(moves):
            leaving = {p: samples[p - first_of[me]] for p in positions if owner[p] == me}
            if leaving:
                outgoing[dp_peers[to]] = pickle.dumps(leaving)
        for part in _all_to_all(outgoing, group, closed):
            held.update(pickle.loads(part) if part else {})
    return [[held[p] for p in microbatch] for microbatch in planned[me]]


def _all_to_all(
    outgoing: Sequence[bytes], group: dist.ProcessGroup | None, closed: threading.Event
) -> list[bytes]:
    """Sends ``outgoing[r]`` to each rank r; returns what each rank sent here."""
    sizes = torch.tensor([len(part) for part in outgoing])
    incoming_sizes = torch.empty_like(sizes)
    work = dist.all_to_all_single(incoming_sizes, sizes, group=group, async_op=True)
    wait_unless_closed(work, closed)

    payload = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)
    received = torch.empty(int(incoming_sizes.sum()), dtype=torch.uint8)
    work = dist.all_to_all_single(
        received,
        payload[: int(sizes.sum())],
        output_split_sizes=incoming_sizes.tolist(),
        input_split_sizes=sizes.tolist(),
        group=group,
        async_op=True,
    )
    wait_unless_closed(work, closed)
    return [bytes(part.numpy()) for part in received.split(incoming_sizes.tolist())]
