"""CPU collectives of the update step loader: counts over all ranks, and samples that move between ranks.

They run in the background thread, over a separate gloo group. No rank starts an update step that
another one could not prepare: abandoned half way, it leaves buffers in FSDP2 (deferred gradient
sync) that ``zero_grad()`` does not clear.
"""

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from recipe_utils.long_rows.parts import WHOLE, Part, part_of
from recipe_utils.plans.rounds import Plan
from recipe_utils.update_steps.samples import Sample

_POLL_SECONDS = 0.0005
_MAX_POLL_SECONDS = 0.008
"""Upper bound of the doubling poll interval, which saves CPU time while a rank is late."""

LengthOf = Callable[[Sample], int]


class OtherRankFailedError(RuntimeError):
    """Another rank could not prepare its part of an update step, so no rank starts it."""


class AbandonedError(RuntimeError):
    """The caller closed the update steps during a collective."""


class Row(NamedTuple):
    """Samples of a microbatch, none in a round without one."""

    samples: list[Sample]
    part: Part = WHOLE
    """Part of a packed row that this rank computes."""


class RankCounts(NamedTuple):
    """Counts of an update step on one rank."""

    counts: Mapping[str, int]
    """Counts by name, divisors of losses among them."""
    num_microbatches: int
    clock_ms: int = 0
    """Monotonic clock [ms]; only differences are meaningful."""
    num_skipped: int = 0
    max_tokens: int = 0
    """Budget of microbatches that the rank proposes for further update steps."""


class StepCounts(NamedTuple):
    """Counts of an update step over all ranks, equal on all of them."""

    totals: Mapping[str, int]
    """Sums over the data-parallel ranks, by name."""
    max_microbatches: int
    """Microbatches of the rank that has most."""
    clock_seconds: float = 0.0
    """Clock of rank 0. Decisions based on it are the same on all ranks."""
    num_skipped: int = 0
    """Sum over the data-parallel ranks."""
    max_tokens: int = 0
    """Least budget that a rank proposes."""


@dataclass(frozen=True)
class StepCollectives:
    """Collectives of an update step; every rank must call each once per step, in order."""

    names: Sequence[str]
    """Names of the counts."""
    counts_its_data: bool
    """False on ranks whose data another rank counts (all but the first of a tensor-parallel group)."""
    dp_peers: Sequence[int]
    """Ranks that samples move between, by data-parallel coordinate; their ``pp`` and ``tp`` are equal."""
    group: dist.ProcessGroup | None
    """CPU group of all ranks."""
    closed: threading.Event
    """Once set, the wait for other ranks ends."""

    def count(self, local: RankCounts | None) -> StepCounts:
        """Sums the counts of an update step over the data-parallel ranks, by one all-reduce.

        A rank that could not prepare the update step passes None and gets the counts of the others.

        Raises:
            AbandonedError: ``closed`` was set first. The group cannot be used after that.
            OtherRankFailedError: a rank passed None; contains the ranks.
        """
        row: tuple[int, ...] = ()
        if local is not None:
            counts = [local.num_skipped, *(local.counts[name] for name in self.names)]
            row = (1, local.num_microbatches, local.clock_ms, local.max_tokens)
            row += tuple(count if self.counts_its_data else 0 for count in counts)
        table = self._gather_rows(row, 5 + len(self.names))

        ready, num_microbatches, clock_ms, max_tokens, skipped, *columns = table.unbind(1)
        if local is not None:
            _check_all_ready(ready)
        return StepCounts(
            {name: int(column.sum()) for name, column in zip(self.names, columns, strict=True)},
            int(num_microbatches.max()),
            int(clock_ms[0]) / 1000,
            int(skipped.sum()),
            int(max_tokens.min()),
        )

    def exchange(
        self, samples: Sequence[Sample] | None, length_of: LengthOf, plan: Plan, max_samples: int
    ) -> list[Row]:
        """Plans an update step over all ranks and sends each sample to its rank.

        Takes one all-reduce of lengths and, unless every sample stays, two all-to-alls of bytes.
        Every rank computes the same plan. None and errors are those of :meth:`count`.

        Args:
            samples: samples of this rank, at most ``max_samples``.
            length_of: returns a sample's length.
            plan: pure and deterministic.
            max_samples: the same on all ranks.

        Returns:
            The microbatches of this rank; none if it passed None.
        """
        # One row per rank: its number of samples plus one, so that 0 reports a failure, and their lengths.
        own = [] if samples is None else [len(samples) + 1, *map(length_of, samples)]
        table = self._gather_rows(own, 1 + max_samples)
        if samples is None:
            return []
        _check_all_ready(table[:, 0])

        rows = [table[peer].tolist() for peer in self.dp_peers]
        num_samples = [row[0] - 1 for row in rows]
        lengths = [length for row in rows for length in row[1 : row[0]]]
        owner = [source for source, number in enumerate(num_samples) for _ in range(number)]
        with record_function("plan"):
            planned = plan(lengths, len(self.dp_peers))
        me = list(self.dp_peers).index(dist.get_rank(self.group))
        held = dict(enumerate(samples, start=sum(num_samples[:me])))

        moves = [
            [p for microbatch in microbatches for p in microbatch if owner[p] != to]
            for to, microbatches in enumerate(planned)
        ]
        if any(moves):
            outgoing = [b""] * len(table)
            for peer, positions in zip(self.dp_peers, moves, strict=True):
                leaving = {p: held[p] for p in positions if owner[p] == me}
                if leaving:
                    outgoing[peer] = pickle.dumps(leaving)
            for part in self._all_to_all(outgoing):
                held.update(pickle.loads(part) if part else {})
        return [
            Row([held[p] for p in microbatch], part_of(planned, me, index))
            for index, microbatch in enumerate(planned[me])
        ]

    def _gather_rows(self, row: Sequence[int], width: int) -> torch.Tensor:
        """Returns the rows of all ranks, [ranks, width] int64, with one all-reduce."""
        table = torch.zeros(dist.get_world_size(self.group), width, dtype=torch.int64)
        table[dist.get_rank(self.group), : len(row)] = torch.tensor(row, dtype=torch.int64)
        self._wait(dist.all_reduce(table, group=self.group, async_op=True))
        return table

    def _all_to_all(self, outgoing: Sequence[bytes]) -> list[bytes]:
        """Sends ``outgoing[r]`` to each rank r; returns what each rank sent to this one."""
        sizes = torch.tensor([len(part) for part in outgoing])
        incoming_sizes = torch.empty_like(sizes)
        work = dist.all_to_all_single(incoming_sizes, sizes, group=self.group, async_op=True)
        self._wait(work)

        payload = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)
        received = torch.empty(int(incoming_sizes.sum()), dtype=torch.uint8)
        work = dist.all_to_all_single(
            received,
            payload[: int(sizes.sum())],
            output_split_sizes=incoming_sizes.tolist(),
            input_split_sizes=sizes.tolist(),
            group=self.group,
            async_op=True,
        )
        self._wait(work)
        return [bytes(part.numpy()) for part in received.split(incoming_sizes.tolist())]

    def _wait(self, work: dist.Work | None) -> None:
        """Waits for a collective or for ``closed``.

        A rank that failed elsewhere must not wait here until the group's timeout, because the other
        ranks wait for it in another collective.
        """
        assert work is not None
        pause_seconds = _POLL_SECONDS
        while not work.is_completed():
            if self.closed.wait(pause_seconds):
                raise AbandonedError("closed while the ranks agreed on an update step")
            pause_seconds = min(2 * pause_seconds, _MAX_POLL_SECONDS)
        work.wait()


@contextmanager
def reporting_failure(collective: Callable[[None], Any]) -> Iterator[None]:
    """Enters the collective that the other ranks wait in, with None, if the block raises an error."""
    try:
        yield
    except Exception:
        collective(None)
        raise


def group_samples(samples: Sequence[Sample], length_of: LengthOf, plan: Plan) -> list[Row]:
    """Returns the microbatches, planned for this rank alone."""
    with record_function("plan"):
        (microbatches,) = plan([length_of(sample) for sample in samples], 1)
    return [Row([samples[position] for position in each]) for each in microbatches]


def _check_all_ready(ready: torch.Tensor) -> None:
    """Raises an error if a rank reported a failure: ``ready``, [ranks], is 0 there."""
    if not ready.all():
        failed = (ready == 0).nonzero().flatten().tolist()
        raise OtherRankFailedError(
            f"rank(s) {failed} could not prepare the next update step, so no rank starts it; the cause is in their logs"
        )
