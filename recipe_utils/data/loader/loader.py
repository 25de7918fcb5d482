"""Update steps: the values that a recipe's loop consumes.

Everything that one optimizer step needs is decided on the CPU before its first forward: the samples,
their microbatches and what they hold over all data-parallel (DP) ranks.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torchtune.utils import get_logger

from recipe_utils.data.loader.collectives import (
    RankCounts,
    StepCounts,
    count_over_ranks,
    exchange_samples,
    group_samples,
)
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.plan import Microbatches
from recipe_utils.data.loader.prefetch import Prefetched
from recipe_utils.data.loader.sampler import (
    epoch_permutation,
    num_update_steps,
    update_step_indices,
)
from recipe_utils.data.loader.samples import (
    CheckedDataset,
    Sample,
    SampleError,
    SkippedSampleError,
    fingerprint,
    load_samples,
)
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.parallel.process_group import agree_on_length
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.settings import naming

_log = get_logger("INFO")


class Collator(Protocol):
    """What the loader must know of the samples of an objective: text, pairs, views.

    A kind whose loss couples samples may have ``block``, an int: so many consecutive samples of an update
    step, from its first on, stay on one rank.
    """

    counts: Sequence[str]
    """Names of what its microbatches count; of these an update step has totals. From samples that count
    nothing of the first nothing can be learned."""
    fingerprint_keys: Sequence[str]
    """Keys of a sample by which a resumed training knows its data again."""

    def plan(self, lengths: Sequence[int], num_ranks: int, /) -> list[Microbatches]:
        """Which samples are in which microbatch of which rank; see :mod:`recipe_utils.data.loader.plan`."""

    def prepare(self, sample: Sample, name: str) -> Sample:
        """Makes of what the dataset returned what the methods below take; where samples are loaded.

        Raises:
            SampleError: says the name, where a sample cannot be trained on.
        """

    def length(self, sample: Sample) -> int:
        """What the plan knows of a sample."""

    def collate(self, samples: Sequence[Sample]) -> Microbatch:
        """Makes a microbatch."""

    def warnings(self) -> Iterator[str]:
        """What a user should know before training."""

    def dummy(self, sample: Sample) -> Microbatch:
        """A microbatch that counts nothing, for a rank that has fewer than the others.

        Every rank must run the same forwards and backwards, or FSDP's collectives hang.
        """


@dataclass(frozen=True)
class UpdateStep:
    """One optimizer step's data on this rank, and what all ranks hold together.

    A value: it can be passed over any number of times.
    """

    index: int
    """Position in its epoch, from 0."""
    microbatches: Sequence[Microbatch]
    """This rank's, on the CPU; as many on every rank."""
    totals: Mapping[str, int]
    """What the microbatches count, by name, over all DP ranks."""
    dp_degree: int
    """Number of ranks that hold different data."""
    samples_consumed: int = 0
    """Of the epoch over all ranks, with this update step."""
    is_last_of_epoch: bool = False
    stop_requested: bool = False
    """Whether some rank was asked to stop; alike on all ranks."""
    clock_seconds: float = 0.0
    """Rank 0's clock when it was counted: as many update steps ago as were prefetched."""
    num_skipped: int = 0
    """Samples of it that are in no microbatch, over all DP ranks."""

    def scale(self, count: str) -> float:
        """What a microbatch's summed loss is multiplied by, to weigh all that is counted alike.

        FSDP2 and DDP average gradients over the DP ranks, hence ``dp_degree`` over the total.
        """
        return self.dp_degree / max(self.totals[count], 1)


class UpdateStepLoader:
    """Makes update steps of a dataset, epoch by epoch, in the background. All ranks together.

    Args:
        dataset: map-style; the same on all ranks.
        kind: of its samples.
        settings: of the data.
        ranks: of the job.
        name: the dataset's key in the config, for errors.
        num_microbatches_to_run: of the microbatches that the fullest rank has, how many all must run;
            at least as many. What a rank lacks are stand-ins. None runs those.

    Raises:
        recipe_utils.settings.settings.ConfigError: no sample, none from which anything can be learned, no update
            step, or ranks that see datasets of different lengths.
    """

    def __init__(
        self,
        dataset: Any,
        kind: Collator,
        settings: DataSettings,
        ranks: Ranks,
        name: str = "dataset",
        num_microbatches_to_run: Callable[[int], int] | None = None,
    ) -> None:
        self._kind = kind
        self.settings = settings
        self._ranks = ranks
        self._num_microbatches_to_run = num_microbatches_to_run
        self._group = ranks.new_cpu_group()
        self._moves_samples = ranks.dp_degree > 1 and (
            settings.microbatching != "in_order"
            if settings.balance_over_ranks is None
            else settings.balance_over_ranks
        )
        self.dataset = CheckedDataset(
            dataset, name, kind.prepare, skips_bad=settings.on_bad_sample == "skip"
        )
        with naming(name):
            if agree_on_length(len(self.dataset), self._group) == 0:
                raise ValueError("it holds 0 samples; give it at least 1")
            self._check_that_something_is_taught()
            self.samples_per_rank = settings.batch_size * settings.num_accumulated(ranks.dp_degree)
            self.global_batch_size = self.samples_per_rank * ranks.dp_degree
            self._block: int = getattr(kind, "block", 1)
            if self.samples_per_rank % self._block:
                raise ValueError(
                    f"{self.samples_per_rank} samples per rank and update step are no multiple of the "
                    f"{self._block} that must be on one rank; set batch_size to a multiple of {self._block}"
                )
        with naming("last_update_step"):
            self.steps_per_epoch = num_update_steps(
                len(self.dataset),
                self.global_batch_size,
                settings.last_update_step,
                settings.max_steps_per_epoch,
            )

    def _check_that_something_is_taught(self) -> None:
        problem = "it has no target"
        for index in range(len(self.dataset)):
            try:
                counts = self._kind.collate([self.dataset[index]]).counts
                if counts[self._kind.counts[0]] > 0:
                    return
            except SkippedSampleError as error:
                problem = str(error)
            except Exception as error:
                is_left_out = isinstance(error, SampleError) and self.dataset.skips_bad
                if not is_left_out:
                    return  # it is named when it is needed
                problem = str(error)
        raise ValueError(
            f"nothing can be learned from any of its {len(self.dataset)} samples (the last: {problem}); look at "
            "its labels, at what masks them (train_on_input), and at tokenizer.max_seq_len"
        )

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for the same samples to be in the same update steps."""
        return {
            **fingerprint(self.dataset, self._kind.fingerprint_keys),
            "global_batch_size": self.global_batch_size,
            "shuffle": self.settings.shuffle,
            # Not where it says nothing: checkpoints of versions before 0.4.2 have none.
            **({"data_seed": self.settings.data_seed} if self.settings.data_seed else {}),
            "last_update_step": self.settings.last_update_step,
        }

    def log_epoch_size(self) -> None:
        """Logs the size of update steps, and what is left out of every epoch; on rank 0."""
        if not self._ranks.is_zero:
            return
        for text in self._kind.warnings():
            _log.warning(text)
        _log.info(
            f"Update step: {self.samples_per_rank} samples on each of {self._ranks.dp_degree} "
            f"data-parallel ranks, {self.global_batch_size} in all; {self.steps_per_epoch} update steps "
            "per epoch"
        )
        num_samples = len(self.dataset)
        num_left_over = num_samples % self.global_batch_size
        if self.settings.last_update_step == "drop" and num_left_over:
            _log.warning(
                f"last_update_step=drop: {num_left_over} of {num_samples} samples are left out of every "
                "epoch, other ones each time"
            )

    def epoch(
        self, epoch: int, samples_consumed: int = 0, stop: threading.Event | None = None
    ) -> Prefetched[UpdateStep]:
        """The update steps of an epoch.

        Args:
            epoch: from 0.
            samples_consumed: of the epoch over all ranks, by update steps that are done.
            stop: once set, the update steps counted from then on say so on all ranks.

        Returns:
            A context manager that iterates over :class:`UpdateStep`. It raises what the dataset or the
            collate function raised, and :class:`recipe_utils.data.loader.collectives.OtherRankFailedError` on all
            other ranks: every rank stops before the same update step.
        """
        first = samples_consumed // self.global_batch_size
        permutation = self._permutation(epoch)
        indices_per_step = [
            self._indices_of(permutation, step, epoch)
            for step in range(first, self.steps_per_epoch)
        ]
        return self.of_samples(indices_per_step, first, stop)

    def _indices_of(self, permutation: Tensor, step: int, epoch: int = 0) -> list[int]:
        return update_step_indices(
            permutation,
            step,
            self.global_batch_size,
            self._ranks.dp_rank,
            self._ranks.dp_degree,
            epoch,
            self._block,
        )

    def _permutation(self, epoch: int) -> Tensor:
        settings = self.settings
        return epoch_permutation(len(self.dataset), epoch, settings.shuffle, settings.data_seed)

    def one_pass(self, num_epochs: int) -> tuple[int, Prefetched[UpdateStep]]:
        """Each sample once that so many epochs consume, in its own order, as many at a time as in them.

        Args:
            num_epochs: from the first one on.

        Returns:
            The number of update steps, and they.
        """
        num_samples, consumed = len(self.dataset), self.steps_per_epoch * self.global_batch_size
        used: set[int] = set()
        for epoch in range(num_epochs):
            if len(used) == num_samples:
                break
            used.update(self._permutation(epoch)[:consumed].tolist())
        indices = torch.tensor(sorted(used))
        num_steps = -(-len(indices) // self.global_batch_size)
        return num_steps, self.of_samples(
            [self._indices_of(indices, step) for step in range(num_steps)]
        )

    def of_samples(
        self,
        indices_per_step: Sequence[list[int]],
        first: int = 0,
        stop: threading.Event | None = None,
    ) -> Prefetched[UpdateStep]:
        """The update steps of given samples; see :meth:`epoch`.

        Args:
            indices_per_step: for each update step, this DP rank's dataset indices; may be empty. As many
                update steps on every rank.
            first: position of the first of them in its epoch.
            stop: see :meth:`epoch`.
        """
        closed = threading.Event()
        steps = self._prepare(first, indices_per_step, stop or threading.Event(), closed)
        return Prefetched(steps, self.settings.prefetch_update_steps, closed)

    def _prepare(
        self,
        first: int,
        indices_per_step: Sequence[list[int]],
        stop: threading.Event,
        closed: threading.Event,
    ) -> Iterator[UpdateStep]:
        samples_per_step = load_samples(self.dataset, indices_per_step, self.settings.num_workers)
        dummy = None
        for index, indices in enumerate(indices_per_step, start=first):
            try:
                samples = next(samples_per_step)
                if dummy is None and self._may_need_dummies():
                    # Now, since nothing may fail any more once the ranks have agreed on the step.
                    sample = samples[0] if samples else self.dataset.any_sample()
                    dummy = self._kind.dummy(sample)
            except Exception:
                # The other ranks learn of it in the collective that they enter next.
                if self._moves_samples:
                    self._move(None, closed)
                else:
                    self._count(None, closed)
                raise
            moved = self._move(samples, closed) if self._moves_samples else None
            try:
                if moved is None:
                    moved = group_samples(samples, self._kind.length, self._kind.plan)
                microbatches = [self._kind.collate(part) for part in moved]
                num_skipped = len(indices) - len(samples)
                counts = self._counts_of(microbatches, num_skipped, stop.is_set())
            except Exception:
                self._count(None, closed)
                raise
            agreed = self._count(counts, closed)
            num_microbatches = agreed.max_microbatches
            if self._num_microbatches_to_run is not None:
                num_microbatches = self._num_microbatches_to_run(num_microbatches)
            if dummy is not None:
                microbatches += [dummy] * (num_microbatches - len(microbatches))
            if self._ranks.device.type == "cuda":
                microbatches = [microbatch.pin_memory() for microbatch in microbatches]
            yield UpdateStep(
                index,
                tuple(microbatches),
                agreed.totals,
                self._ranks.dp_degree,
                samples_consumed=(index + 1) * self.global_batch_size,
                is_last_of_epoch=index + 1 == self.steps_per_epoch,
                stop_requested=agreed.stop_requested,
                clock_seconds=agreed.clock_seconds,
                num_skipped=agreed.num_skipped,
            )

    def _may_need_dummies(self) -> bool:
        return self._ranks.dp_degree > 1 or self._num_microbatches_to_run is not None

    def _move(
        self, samples: Sequence[Sample] | None, closed: threading.Event
    ) -> list[list[Sample]]:
        return exchange_samples(
            samples,
            self._kind.length,
            self._kind.plan,
            max_samples=self.samples_per_rank,
            dp_peers=self._ranks.dp_peers,
            group=self._group,
            closed=closed,
        )

    def _count(self, counts: RankCounts | None, closed: threading.Event) -> StepCounts:
        return count_over_ranks(
            counts, self._kind.counts, self._ranks.is_dp_leader, self._group, closed
        )

    def _counts_of(
        self, microbatches: Sequence[Microbatch], num_skipped: int, stops: bool
    ) -> RankCounts:
        return RankCounts(
            {
                name: sum(microbatch.counts[name] for microbatch in microbatches)
                for name in self._kind.counts
            },
            len(microbatches),
            stops,
            time.monotonic_ns() // 1_000_000,
            num_skipped,
        )
