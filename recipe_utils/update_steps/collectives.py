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
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from recipe_utils.plans.rounds import WHOLE, Plan, Share, share_of
from recipe_utils.update_steps.samples import Prepared

_POLL_SECONDS = 0.0005
_MAX_POLL_SECONDS = 0.008
"""Upper bound of the doubling poll interval, which saves CPU time while a rank is late."""

LengthOf = Callable[[Prepared], int]


class OtherRankFailedError(RuntimeError):
    """Another rank could not prepare its part of an update step, so no rank starts it."""


class AbandonedError(RuntimeError):
    """The caller closed the update steps during a collective."""


class Row(NamedTuple):
    """Samples of a microbatch, none in a round without one."""

    samples: list[Prepared]
    share: Share = WHOLE
    """Share of a packed row that this rank computes."""


class RankCounts(NamedTuple):
    """Counts of an update step on one rank."""

    counts: Mapping[str, float]
    """Counts by name, divisors of losses among them."""
    num_microbatches: int
    max_tokens: int = 0
    """Budget of microbatches that the rank proposes for further update steps."""


class StepCounts(NamedTuple):
    """Counts of an update step over all ranks, equal on all of them."""

    totals: Mapping[str, float]
    """Sums over the data-parallel ranks, by name."""
    max_microbatches: int
    """Microbatches of the rank that has most."""
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
        row: list[float] = []
        if local is not None:
            counts = [local.counts[name] if self.counts_its_data else 0 for name in self.names]
            row = [1, local.num_microbatches, local.max_tokens, *counts]
        table = self._gather_rows(row, 3 + len(self.names), torch.float64)  # whole numbers are exact
        is_ready, num_microbatches, max_tokens, *columns = table.unbind(1)
        if local is not None:
            _check_all_ready(is_ready)
        totals = {name: _plain(column.sum().item()) for name, column in zip(self.names, columns, strict=True)}
        return StepCounts(totals, int(num_microbatches.max()), int(max_tokens.min()))

    def exchange(
        self, samples: Sequence[Prepared] | None, length_of: LengthOf, plan: Plan, max_samples: int
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
        local_lengths = [] if samples is None else [len(samples) + 1, *map(length_of, samples)]
        table = self._gather_rows(local_lengths, 1 + max_samples)
        if samples is None:
            return []
        _check_all_ready(table[:, 0])

        # Of two ranks with samples of 5, 9 and of 3, 2 tokens each has lengths [5, 9, 3, 2], owner [0, 0, 1, 1].
        rows = [table[peer].tolist() for peer in self.dp_peers]
        num_samples = [row[0] - 1 for row in rows]
        lengths = [length for row in rows for length in row[1 : row[0]]]
        owner = [source for source, number in enumerate(num_samples) for _ in range(number)]
        with record_function("plan"):
            planned = plan(lengths, len(self.dp_peers))
        # Rank 0 holds positions 0 and 1; if rank 1 is to compute [0, 2, 3], position 0 moves.
        me = list(self.dp_peers).index(dist.get_rank(self.group))
        held = dict(enumerate(samples, start=sum(num_samples[:me])))

        moves = [
            [p for microbatch in microbatches for p in microbatch if owner[p] != to]
            for to, microbatches in enumerate(planned)
        ]
        # All ranks know all moves, so they agree on whether there is anything to send.
        if any(moves):
            outgoing = [b""] * len(table)
            for peer, positions in zip(self.dp_peers, moves, strict=True):
                leaving = {p: held[p] for p in positions if owner[p] == me}
                if leaving:
                    outgoing[peer] = pickle.dumps(leaving)
            for part in self._all_to_all(outgoing):
                held.update(pickle.loads(part) if part else {})
        return [
            Row([held[p] for p in microbatch], share_of(planned, me, index))
            for index, microbatch in enumerate(planned[me])
        ]

    def _gather_rows(self, row: Sequence[float], width: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Returns the rows of all ranks, [ranks, width], with one all-reduce."""
        table = torch.zeros(dist.get_world_size(self.group), width, dtype=dtype)
        table[dist.get_rank(self.group), : len(row)] = torch.tensor(row, dtype=dtype)
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


def group_samples(samples: Sequence[Prepared], length_of: LengthOf, plan: Plan) -> list[Row]:
    """Returns the microbatches, planned for this rank alone."""
    with record_function("plan"):
        (microbatches,) = plan([length_of(sample) for sample in samples], 1)
    return [Row([samples[position] for position in positions]) for positions in microbatches]


def _plain(number: float) -> float:
    """Returns a whole number as an int: of tokens, not of their weights."""
    return int(number) if number.is_integer() else number


def _check_all_ready(ready: torch.Tensor) -> None:
    """Raises an error if a rank reported a failure: ``ready``, [ranks], is 0 there."""
    if not ready.all():
        failed = (ready == 0).nonzero().flatten().tolist()
        raise OtherRankFailedError(
            f"rank(s) {failed} could not prepare the next update step, so no rank starts it; the cause is in their logs"
        )


class Agreement:
    """Collectives of one update step. Every rank enters each of them once, in the same order.

    An error on one rank, in any phase, must reach the others, which wait in a collective. So the rank enters the
    collective that the others wait in, without data. An error that a collective raises is that of all ranks
    already: reporting it again would wait for ever.
    """

    def __init__(self, together: StepCollectives, length_of: LengthOf, plan: Plan, max_samples: int | None) -> None:
        self._together, self._length_of, self._plan, self._max_samples = together, length_of, plan, max_samples
        self._next: Callable[[None], object] | None = together.count if max_samples is None else self._exchange
        """Collective that the other ranks wait in."""

    def exchange(self, samples: Sequence[Prepared]) -> list[Row]:
        """Returns the rows of this rank, planned over all ranks, or for this one alone without ``max_samples``."""
        if self._max_samples is None:
            return group_samples(samples, self._length_of, self._plan)
        self._next = None
        with record_function("exchange"):
            rows = self._exchange(samples)
        self._next = self._together.count
        return rows

    def count(self, local: RankCounts) -> StepCounts:
        """Returns counts over all ranks."""
        self._next = None
        with record_function("count"):
            return self._together.count(local)

    def report_failure(self) -> None:
        """Enters the collective that the other ranks wait in, without data."""
        if self._next is not None:
            self._next(None)

    def _exchange(self, samples: Sequence[Prepared] | None) -> list[Row]:
        assert self._max_samples is not None
        return self._together.exchange(samples, self._length_of, self._plan, self._max_samples)


@contextmanager
def agreement(
    together: StepCollectives, length_of: LengthOf, plan: Plan, max_samples: int | None
) -> Iterator[Agreement]:
    """Yields the collectives of an update step; an error in the block reaches the other ranks, too.

    ``max_samples``, the same on all ranks, are the most on a rank if samples move between ranks; else None.
    """
    agree = Agreement(together, length_of, plan, max_samples)
    try:
        yield agree
    except Exception:
        agree.report_failure()
        raise
