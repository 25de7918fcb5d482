"""Update steps: the data of one optimizer step, determined on the CPU before its first forward."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torchtune.utils import get_logger

from recipe_utils.data.loader.collectives import (
    RankCounts,
    StepCollectives,
    group_samples,
    reporting_failure,
)
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.prefetch import Prefetched
from recipe_utils.data.loader.sampler import (
    UpdateSteps,
    epoch_permutation,
    num_update_steps,
    shares_of_ranks,
    update_step_indices,
)
from recipe_utils.data.loader.samples import (
    CheckedDataset,
    Sample,
    SampleError,
    fingerprint,
    load_samples,
)
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.mixture import Mixture, MixtureOrder
from recipe_utils.data.order import NUM_IN_MEMORY, seed_of
from recipe_utils.data.plan.plan import WHOLE, Microbatches, Part
from recipe_utils.parallel.process_group import agree_on_length, elastic_nodes
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import ConfigError, Problem, naming

_log = get_logger("INFO")

_NUM_REMARKED = 100
"""Maximum number of samples that are read for remarks before training."""
_NUM_MEASURED = 1000
"""Maximum number of samples of a dataset that are read for its mean number of target tokens."""

OF_DATASET = "target_tokens/"
"""Prefix of the counts of named datasets."""


class Collator(Protocol):
    """Checks, measurement, plans and collation of the samples of one objective.

    With ``max_ranks_per_row`` its ``collate`` also takes the :class:`.Part` of a row that this rank
    computes. With an attribute ``block`` (int, a divisor of ``batch_size``), so many consecutive samples of an
    update step stay on one rank. Losses that couple samples need it.
    """

    @property
    def counts(self) -> Sequence[str]:
        """Returns the names of its counts; a sample whose first count is 0 has nothing to train on."""

    @property
    def fingerprint_keys(self) -> Sequence[str]:
        """Returns the keys of a sample that are hashed to recognize the dataset on resume."""

    def plan(self, lengths: Sequence[int], num_ranks: int, /) -> list[Microbatches]:
        """Assigns samples to microbatches and ranks; see :mod:`recipe_utils.data.plan.plan`."""

    def prepare(self, sample: Sample, name: str) -> Sample:
        """Converts an item of the dataset for the other methods. Called in DataLoader workers.

        Raises:
            SampleError: the sample cannot be trained on; the message starts with ``name``.
        """

    def length(self, sample: Sample) -> int:
        """Returns the length by which a sample is planned."""

    def collate(self, samples: Sequence[Sample]) -> Microbatch:
        """Makes a microbatch."""

    def warnings(self) -> Iterator[str]:
        """Yields warnings to log before training."""

    def remarks(self, sample: Sample) -> Iterator[str]:
        """Yields what is doubtful in a prepared sample, in words that are counted over samples."""

    def dummy(self, sample: Sample) -> Microbatch:
        """Makes a dummy microbatch, whose loss is zero and has a graph.

        Ranks with fewer microbatches run it, so that FSDP's collectives match.
        """


@dataclass(frozen=True)
class UpdateStep:
    """Data of one optimizer step on this rank, with totals over all data-parallel (DP) ranks."""

    index: int
    """Position in its epoch, from 0."""
    microbatches: Sequence[Microbatch]
    """Microbatches of this rank, on the CPU; every rank has the same number."""
    totals: Mapping[str, int]
    """Counts of the microbatches by name, over all DP ranks."""
    dp_degree: int
    """Number of ranks that hold different data."""
    samples_consumed: int = 0
    """Samples of the epoch over all ranks, up to and including this update step."""
    is_last_of_epoch: bool = False
    clock_seconds: float = 0.0
    """Clock of rank 0 when the update step was counted, possibly ahead by prefetching."""
    num_skipped: int = 0
    """Skipped samples of the update step, over all DP ranks."""

    def scale(self, count: str) -> float:
        """Returns the factor for a microbatch's summed loss that makes it a mean over ``count``.

        FSDP2 and DDP average gradients over the DP ranks, hence ``dp_degree`` over the total.
        """
        return self.dp_degree / max(self.totals[count], 1)

    @property
    def token_shares(self) -> dict[str, float]:
        """Returns the fraction of the target tokens of each named dataset, as ``token_share/NAME``."""
        return {
            f"token_share/{name.removeprefix(OF_DATASET)}": number / self.totals["target_tokens"]
            for name, number in self.totals.items()
            if name.startswith(OF_DATASET)
        }


class UpdateStepLoader:
    """Loader of update steps, which a background thread prepares. All ranks call it together.

    Args:
        dataset: map-style; the same on all ranks.
        collator: collator of its samples.
        settings: data settings.
        ranks: ranks of the job.
        name: config key of the dataset, for errors. Those of other keys than ``dataset`` share a group of
            ranks, so only one of them is iterated over at a time.
        num_microbatches_to_run: maps the largest number of microbatches on a rank to the number, at
            least as large, that all ranks run with dummy ones. Default: the same number.
        num_epochs: epochs of the training, in which a mixture takes its shares; None to take each
            sample of a mixture once per epoch.
        saved: fingerprint of the checkpoint that training resumes from.
        weigh: maps ``loss_weights`` and target tokens over all ranks of k named datasets to
            ``dataset_weights`` of an update step. Default: none, and no sums by dataset.

    Raises:
        recipe_utils.settings.problems.ConfigError: the dataset is empty, has nothing to train on,
            forms no update step, or differs in length between ranks.
    """

    def __init__(
        self,
        dataset: Any,
        collator: Collator,
        settings: DataSettings,
        ranks: Ranks,
        name: str = "dataset",
        num_microbatches_to_run: Callable[[int], int] | None = None,
        num_epochs: int | None = None,
        saved: Mapping[str, Any] = {},
        weigh: Callable[[Sequence[float], Sequence[int]], Tensor] | None = None,
    ) -> None:
        self._collator = collator
        self.settings = settings
        self._ranks = ranks
        self._num_microbatches_to_run = num_microbatches_to_run
        self._group = ranks.prefetch_group if name == "dataset" else ranks.validation_group
        self.dataset = CheckedDataset(
            dataset, name, collator.prepare, skips_bad=settings.on_bad_sample == "skip"
        )
        counts_datasets = isinstance(dataset, Mixture) and collator.counts[0] == "target_tokens"
        names = dataset.names if counts_datasets else ()
        self._counts_of_datasets = [f"{OF_DATASET}{each}" for each in names]
        self._weigh = weigh if names else None
        self.num_sums = 1 + len(names) if self._weigh else 1
        """Sums of the loss module: over all targets, and with ``weigh`` over those of each dataset."""
        num_samples = len(self.dataset)
        with naming(name):
            if agree_on_length(num_samples, self._group) == 0:
                raise ValueError("it has 0 samples; at least 1 is needed")
            if (
                self.dataset.find_draws()
                and settings.prefetch_update_steps
                and not settings.num_workers
            ):
                text = (
                    f"samples of {name} draw from a global random generator, as training does at the same time, so no "
                    "run could be repeated or resumed; set num_workers to 1 or more"
                )
                raise ConfigError(Problem("num_workers", text, 0))
            self._check_has_targets()
            per_rank = settings.batch_size * settings.num_accumulated(ranks.dp_degree)
            self.global_batch_size = settings.global_batch_size or per_rank * ranks.dp_degree
            self._shares = shares_of_ranks(self.global_batch_size, ranks.dp_degree)
            self.samples_per_rank = self._shares[0]  # the largest share
            self._block: int = getattr(collator, "block", 1)
        self.samples_per_epoch = num_samples
        """Samples of an epoch, before it is cut to update steps."""
        self._mixture: MixtureOrder | None = None
        mixture = self.dataset.mixture
        if num_epochs is not None and mixture is not None and mixture.schedules is not None:
            with naming(name):
                self._mixture = self._order_of(mixture, num_epochs, saved)
            self.samples_per_epoch = self._mixture.samples_per_epoch
            self.steps_per_epoch = self._mixture.steps_per_epoch
            return
        with naming("last_update_step"):
            self.steps_per_epoch = num_update_steps(
                num_samples,
                self.global_batch_size,
                settings.last_update_step,
                settings.max_steps_per_epoch,
            )

    def _order_of(
        self, mixture: Mixture, num_epochs: int, saved: Mapping[str, Any]
    ) -> MixtureOrder:
        means = None
        if self.settings.of_mixture.weigh == "tokens":
            if "target_tokens" not in self._collator.counts:
                text = "there are no target tokens here; set it to samples"
                raise ConfigError(Problem("mixture.weigh", text, "tokens"))
            means = saved.get("mean_target_tokens") or self._measure_target_tokens(mixture)
        order = MixtureOrder(mixture, self.settings, self.global_batch_size, num_epochs, means)
        if problems := [*order.problems(self.dataset.name)]:
            raise ConfigError(*problems)
        return order

    def _measure_target_tokens(self, mixture: Mixture) -> dict[str, float]:
        """Returns the mean number of target tokens of some samples of each dataset, by name."""
        means = {}
        for which, (name, start) in enumerate(zip(mixture.names, mixture.starts, strict=True)):
            seed = seed_of(self.settings.data_seed, 2, which)
            order = epoch_permutation(mixture.lengths[which], 0, shuffle=True, seed=seed)
            indices = [start + index for index in order[:_NUM_MEASURED].tolist()]
            with torch.random.fork_rng(devices=[]):
                samples = next(load_samples(self.dataset, [indices]))
            counts = [self._collator.collate([each]).counts["target_tokens"] for each in samples]
            if not any(counts):
                raise ValueError(f"{name}: none of {len(indices)} samples has target tokens")
            means[name] = round(sum(counts) / len(counts), 2)
        return means

    def _check_has_targets(self) -> None:
        problem = "it has no target"
        for index in range(len(self.dataset)):
            try:
                if self._collator.collate([self.dataset[index]]).counts[self._collator.counts[0]]:
                    return
            except Exception as error:
                if not (isinstance(error, SampleError) and self.dataset.skips(error)):
                    return  # raised again when its update step is prepared
                problem = str(error)
        advice = ""
        if "labels" in self._collator.fingerprint_keys:
            advice = (
                "; check its labels, what masks them (train_on_input), and tokenizer.max_seq_len"
            )
        raise ValueError(
            f"none of its {len(self.dataset)} samples can be trained on (the last: {problem}){advice}"
        )

    def fingerprint(self) -> dict[str, Any]:
        """Returns values that must be equal for update steps to contain the same samples."""
        lengths: Sequence[int] = [len(self.dataset)]
        if self._mixture is not None:
            lengths = self._mixture.mixture.lengths
        is_lazy = self.settings.shuffle and sum(lengths) > NUM_IN_MEMORY
        return {
            **fingerprint(self.dataset, self._collator.fingerprint_keys, lengths),
            **(self._mixture.fingerprint() if self._mixture is not None else {}),
            **({"order": "feistel"} if is_lazy else {}),
            "global_batch_size": self.global_batch_size,
            "shuffle": self.settings.shuffle,
            "data_seed": self.settings.data_seed,
            "last_update_step": self.settings.last_update_step,
        }

    def log_epoch_size(self) -> None:
        """Logs the size of update steps, and warnings, on rank 0."""
        if not self._ranks.is_zero:
            return
        for text in self._collator.warnings():
            _log.warning(text)
        size, settings, (*others, least) = self.global_batch_size, self.settings, self._shares
        is_uneven = least < self.samples_per_rank
        if elastic_nodes() and (
            settings.gradient_accumulation_steps or not settings.global_batch_size
        ):
            _log.warning(
                f"gradient_accumulation_steps={settings.gradient_accumulation_steps or 1}: another number of nodes would "
                f"change the update step, so a resume would be refused; set global_batch_size={size} instead"
            )
        if is_uneven:
            listed = f"{', '.join(map(str, others))} and" if len(others) < 8 else f"{others[0]} or"
            _log.info(
                f"global_batch_size={size}: {len(self._shares)} ranks take {listed} {least} samples"
            )
        _log.info(
            f"Update step: {'at most ' * is_uneven}{self.samples_per_rank} samples on each of "
            f"{self._ranks.dp_degree} data-parallel ranks, {size} in total; {self.steps_per_epoch} update steps per epoch"
        )
        self._log_remarks()
        num_left_over = self.samples_per_epoch % self.global_batch_size
        if self._mixture is not None:
            for line in self._mixture.log_lines():
                _log.info(line)
            if num_left_over and self.settings.max_steps_per_epoch is None:
                _log.info(
                    f"{self.dataset.name}: a mixture has no short last update step; its epoch ends at "
                    f"{self.steps_per_epoch} of {self.samples_per_epoch} / {self.global_batch_size}"
                )
        elif self.settings.last_update_step == "drop" and num_left_over:
            _log.warning(
                f"last_update_step=drop: {num_left_over} of {len(self.dataset)} samples are skipped in every epoch"
            )

    def _log_remarks(self) -> None:
        """Logs how many of some samples, evenly spaced, are skipped or doubtful, and why."""
        num_read = min(len(self.dataset), _NUM_REMARKED)
        remarks: Counter[str] = Counter()
        for i in range(num_read):
            try:
                with torch.random.fork_rng(devices=[]):
                    sample = self.dataset[i * len(self.dataset) // num_read]
                remarks.update(self._collator.remarks(sample))
            except SampleError as error:
                if not self.dataset.skips(error):
                    return  # raised again when its update step is prepared
                remarks[f"skipped ({str(error).rpartition(': ')[2]})"] += 1
        for remark, number in remarks.most_common():
            _log.info(f"{self.dataset.name}: {number} of {num_read} samples read: {remark}")

    def epoch(self, epoch: int, samples_consumed: int = 0) -> Prefetched[UpdateStep]:
        """Returns the update steps of an epoch.

        Args:
            epoch: index of the epoch, from 0.
            samples_consumed: samples of the epoch, over all ranks, whose update steps are done.

        Returns:
            A context manager that iterates over :class:`UpdateStep`. It raises errors of the
            dataset or the collator, and on other ranks
            :class:`recipe_utils.data.loader.collectives.OtherRankFailedError`: all ranks stop
            before the same update step.
        """
        first = samples_consumed // self.global_batch_size
        steps = range(first, self.steps_per_epoch)
        return self.of_samples(self._indices(self._order(epoch), steps, epoch), first)

    def one_pass(self, num_epochs: int) -> tuple[int, Prefetched[UpdateStep]]:
        """Returns the number of update steps, and update steps with each sample of some epochs once.

        Samples are in dataset order, ``global_batch_size`` at a time.
        """
        is_used, size = np.zeros(len(self.dataset), dtype=bool), self.global_batch_size
        for epoch in range(num_epochs):
            order = self._order(epoch)
            for step in range(self.steps_per_epoch):
                is_used[order[step * size : (step + 1) * size]] = True
            if is_used.all():
                break
        used = np.flatnonzero(is_used)
        steps = range(-(-len(used) // size))
        return len(steps), self.of_samples(self._indices(used, steps))

    def _order(self, epoch: int) -> Any:
        if self._mixture is not None:
            return self._mixture.epoch(epoch)
        settings = self.settings
        return epoch_permutation(len(self.dataset), epoch, settings.shuffle, settings.data_seed)

    def _indices(self, order: Any, steps: range, epoch: int = 0) -> UpdateSteps:
        size, ranks = self.global_batch_size, self._ranks
        place = (ranks.dp_rank, ranks.dp_degree, epoch, self._block)
        return UpdateSteps(steps, lambda step: update_step_indices(order, step, size, *place))

    def of_samples(
        self, indices_per_step: Sequence[list[int]], first: int = 0
    ) -> Prefetched[UpdateStep]:
        """Returns update steps of given samples; see :meth:`epoch`.

        Args:
            indices_per_step: dataset indices of this DP rank, possibly none, for each update step;
                every rank must have the same number of update steps.
            first: position of the first update step in its epoch.
        """
        closed = threading.Event()
        steps = self._prepare(first, indices_per_step, closed)
        return Prefetched(steps, self.settings.prefetch_update_steps, closed)

    def _collate(
        self, samples: Sequence[Sample], part: Part, dummy: Microbatch | None
    ) -> Microbatch:
        if not samples:
            assert dummy is not None  # only plans over several ranks have rounds without samples
            return dummy
        collate: Any = self._collator.collate
        return collate(samples) if part == WHOLE else collate(samples, part)

    def _prepare(
        self,
        first: int,
        indices_per_step: Sequence[list[int]],
        closed: threading.Event,
    ) -> Iterator[UpdateStep]:
        collator, ranks = self._collator, self._ranks
        of_datasets = self._counts_of_datasets
        names = [*collator.counts, *of_datasets]
        together = StepCollectives(names, ranks.is_dp_leader, ranks.dp_peers, self._group, closed)
        exchange = partial(
            together.exchange,
            length_of=collator.length,
            plan=collator.plan,
            max_samples=self.samples_per_rank,
        )
        exchanges = ranks.dp_degree > 1 and self.settings.moves_samples
        may_need_dummies = ranks.dp_degree > 1 or self._num_microbatches_to_run is not None
        samples_per_step = load_samples(self.dataset, indices_per_step, self.settings.num_workers)
        dummy = None
        for index, indices in enumerate(indices_per_step, start=first):
            with reporting_failure(exchange if exchanges else together.count):
                samples = next(samples_per_step)
                if dummy is None and may_need_dummies:
                    # Before the ranks agree on the step: nothing may fail after that.
                    dummy = collator.dummy(samples[0] if samples else self.dataset.any_sample())
            exchanged = exchange(samples) if exchanges else None
            with reporting_failure(together.count):
                if exchanged is None:
                    exchanged = group_samples(samples, collator.length, collator.plan)
                microbatches = [self._collate(of_row, part, dummy) for of_row, part in exchanged]
                counts = {
                    name: sum(m.counts.get(name, 0) for m in microbatches)
                    for name in collator.counts
                }
                for i, name in enumerate(of_datasets):
                    counts[name] = sum(m.targets.num_of_dataset(i) for m in microbatches)
                local = RankCounts(
                    counts,
                    len(microbatches),
                    time.monotonic_ns() // 1_000_000,
                    num_skipped=len(indices) - len(samples),
                )
            agreed = together.count(local)
            num_to_run = agreed.max_microbatches
            if self._num_microbatches_to_run is not None:
                num_to_run = self._num_microbatches_to_run(num_to_run)
            if dummy is not None:
                microbatches += [dummy] * (num_to_run - len(microbatches))
            if self._weigh is not None:
                of_all_ranks = [agreed.totals[name] for name in of_datasets]
                weights = self._weigh(self.dataset.dataset.loss_weights, of_all_ranks)
                microbatches = [m.with_dataset_weights(weights) for m in microbatches]
            if ranks.device.type == "cuda":
                microbatches = [microbatch.pin_memory() for microbatch in microbatches]
            yield UpdateStep(
                index,
                tuple(microbatches),
                agreed.totals,
                ranks.dp_degree,
                samples_consumed=(index + 1) * self.global_batch_size,
                is_last_of_epoch=index + 1 == self.steps_per_epoch,
                clock_seconds=agreed.clock_seconds,
                num_skipped=agreed.num_skipped,
            )
