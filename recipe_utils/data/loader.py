"""Update steps: the values that a recipe's loop consumes.

Everything that one optimizer step needs is decided on the CPU before its first forward: the samples,
their microbatches and how many target tokens they hold over all data-parallel (DP) ranks.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from recipe_utils.data.balance import Plan, group_samples
from recipe_utils.data.collate import Collate, Microbatch, collate_empty_microbatch
from recipe_utils.data.count import RankCounts, StepCounts, count_over_ranks
from recipe_utils.data.prefetch import Prefetched
from recipe_utils.data.samples import CheckedDataset, Sample, load_samples

Exchange = Callable[..., list[list[Sample]]]


class UpdateStep:
    """One optimizer step's data on this rank, and what all ranks hold together.

    Iterate once: ``for microbatch, is_last in step``. Each microbatch is let go as it is handed out.

    Args:
        index: position of the update step in its epoch, from 0.
        microbatches: this rank's; as many on every rank.
        counts: totals over all ranks.
        dp_degree: number of ranks that hold different data.
    """

    def __init__(
        self, index: int, microbatches: list[Microbatch], counts: StepCounts, dp_degree: int
    ) -> None:
        self.index = index
        self.num_target_tokens = counts.num_target_tokens
        self.num_real_tokens = counts.num_real_tokens
        self.num_slots = counts.num_slots
        # On all ranks alike, whichever of them was asked to.
        self.stop_requested = counts.stop_requested
        # Rank 0's, when it was counted [s]: as many update steps ago as were prefetched.
        self.clock_seconds = counts.clock_seconds
        # FSDP2 and DDP average gradients over the DP ranks, hence the factor.
        self.loss_scale = dp_degree / max(counts.num_target_tokens, 1)
        self._microbatches = microbatches

    def __iter__(self) -> Iterator[tuple[Microbatch, bool]]:
        self._microbatches.reverse()
        while self._microbatches:
            microbatch = self._microbatches.pop()
            yield microbatch, not self._microbatches


def prefetch_update_steps(
    dataset: CheckedDataset,
    indices_per_step: Sequence[list[int]],
    *,
    plan: Plan,
    collate: Collate,
    ignore_index: int,
    dp_degree: int,
    counts_once: bool,
    group: dist.ProcessGroup | None,
    depth: int,
    first_index: int = 0,
    num_microbatches_to_run: Callable[[int], int] | None = None,
    exchange: Exchange | None = None,
    stop: threading.Event | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Prefetched[UpdateStep]:
    """The update steps of (a part of) an epoch, prepared in the background.

    Every rank of ``group`` must ask for the same number of update steps.

    Args:
        dataset: of samples.
        indices_per_step: for each update step, this DP rank's dataset indices; may be empty.
        plan: of :mod:`recipe_utils.data.plan`, with all but lengths and ranks bound.
        collate: of :mod:`recipe_utils.data.collate`, with all but the samples bound.
        ignore_index: the label of positions that are no targets.
        dp_degree: number of ranks that hold different data.
        counts_once: False on ranks whose data another rank counts already.
        group: a CPU (gloo) group of all ranks that nothing else uses while this runs.
        depth: update steps that may wait ready; 0 prepares each when it is asked for.
        exchange: :func:`recipe_utils.data.balance.exchange_samples` with all but samples, plan and
            ``closed`` bound, to plan over all ranks. None leaves every sample on its rank.
        first_index: position of the first of these update steps in its epoch.
        num_microbatches_to_run: of the microbatches that the fullest rank has, how many all must run; at
            least as many. What a rank lacks are microbatches without targets. None runs those.
        stop: once set, the update steps counted from then on say so on all ranks. None never asks.
        num_workers: DataLoader worker processes; 0 loads in the background thread.
        pin_memory: put tensors into page-locked memory, for devices that copy from there.

    Returns:
        A context manager that iterates over :class:`UpdateStep`. It raises what the dataset or the
        collate function raised, and :class:`recipe_utils.data.count.OtherRankFailedError` on all other
        ranks: every rank stops before the same update step.
    """
    closed = threading.Event()

    def update_steps() -> Iterator[UpdateStep]:
        samples_per_step = load_samples(dataset, indices_per_step, num_workers)
        stand_in = None
        for index in range(len(indices_per_step)):
            try:
                samples = next(samples_per_step)
                if stand_in is None and (dp_degree > 1 or num_microbatches_to_run is not None):
                    # Now, since nothing may fail any more once the ranks have agreed on the step.
                    sample = samples[0] if samples else dataset.any_sample()
                    stand_in = collate_empty_microbatch(sample, collate, ignore_index)
            except Exception:
                # The other ranks learn of it in the collective that they enter next.
                if exchange is not None:
                    exchange(None, plan, closed=closed)
                else:
                    count_over_ranks(None, counts_once, group, closed)
                raise
            moved = exchange(samples, plan, closed=closed) if exchange is not None else None
            try:
                parts = group_samples(samples, plan) if moved is None else moved
                microbatches = [collate(part) for part in parts]
            except Exception:
                count_over_ranks(None, counts_once, group, closed)
                raise
            stops = stop is not None and stop.is_set()
            counts = count_over_ranks(_counts_of(microbatches, stops), counts_once, group, closed)
            num_microbatches = counts.max_microbatches
            if num_microbatches_to_run is not None:
                num_microbatches = num_microbatches_to_run(num_microbatches)
            if stand_in is not None:
                microbatches += [stand_in] * (num_microbatches - len(microbatches))
            if pin_memory:
                microbatches = [microbatch.pin_memory() for microbatch in microbatches]
            yield UpdateStep(first_index + index, microbatches, counts, dp_degree)

    return Prefetched(update_steps(), depth, closed)


def _counts_of(microbatches: list[Microbatch], stop_requested: bool) -> RankCounts:
    return RankCounts(
        sum(microbatch.num_target_tokens for microbatch in microbatches),
        sum(microbatch.num_real_tokens for microbatch in microbatches),
        sum(microbatch.num_slots for microbatch in microbatches),
        len(microbatches),
        stop_requested,
        time.monotonic_ns() // 1_000_000,
    )
