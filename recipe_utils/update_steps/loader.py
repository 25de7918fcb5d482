"""Update steps: the data of one optimizer step, determined on the CPU before its first forward.

:meth:`UpdateStepLoader._prepare` processes samples in a background thread:

==========  ===========================================================  =======================
order       indices of the update step's samples on this rank            sampler, mixture, order
load        checked samples                                              samples, workers
plan        which rank computes which samples in which row               plan/
exchange    samples move to the ranks that compute them                  collectives
collate     rows become tensors                                          text/, pairs/, images/
count       sums over ranks; no rank starts what another cannot prepare  collectives
queue       update steps that are prepared ahead of the loop             prefetch
==========  ===========================================================  =======================

:mod:`recipe_utils.training.start` reads, checks and logs before training.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from recipe_utils.long_rows.parts import WHOLE, cut
from recipe_utils.parallel.process_group import agree_on_length
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import ConfigError, naming
from recipe_utils.text.mixture import Mixture, MixtureOrder
from recipe_utils.training.start import check_draws, content_hashes, probe
from recipe_utils.update_steps.collectives import RankCounts, Row, StepCollectives, group_samples, reporting_failure
from recipe_utils.update_steps.objective import Collator
from recipe_utils.update_steps.order import (
    Order,
    ShuffledOrder,
    UpdateSteps,
    num_update_steps,
    shares_of_ranks,
    update_step_indices,
)
from recipe_utils.update_steps.permutation import NUM_IN_MEMORY
from recipe_utils.update_steps.prefetch import Prefetched
from recipe_utils.update_steps.samples import CheckedDataset, load_samples
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import OF_DATASET, Microbatch, SampleSums


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
    sample_sums: SampleSums | None = None
    """Losses by sample on this rank; None unless :attr:`UpdateStepLoader.records_losses`."""

    @property
    def longest(self) -> int:
        """Returns the most positions of a microbatch, or part of one, on this rank; 0 for images."""
        rows = [m.inputs["tokens"] for m in self.microbatches if "tokens" in m.inputs]
        return max((row.numel() for row in rows), default=0)

    def scale(self, count: str) -> float:
        """Returns the factor for a microbatch's summed loss that makes it a mean over ``count``.

        FSDP2 and DDP average gradients over the DP ranks, hence ``dp_degree`` over the total.
        """
        return self.dp_degree / max(self.totals[count], 1)

    def sums_by_dataset(self, ranks: Ranks) -> Tensor:
        """Returns this rank's sums of losses of each named dataset, [k] fp64; [0] if they are not recorded.

        Times the number of pipeline stages, of which one has losses: their mean over stages is the sums.
        """
        num_datasets = sum(name.startswith(OF_DATASET) for name in self.totals)
        if self.sample_sums is None or not num_datasets:
            return torch.zeros(0, dtype=torch.float64, device=ranks.device)
        return self.sample_sums.by_dataset(num_datasets, ranks.device) * ranks.dims.pp

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
        fill: maps the largest number of microbatches on a rank to the number, at least as large, that
            all ranks run with dummy ones. Default: the same number.
        is_drawn: a mixture takes its shares; else each of its samples comes once per epoch.

    Raises:
        recipe_utils.settings.problems.ConfigError: the dataset is empty, has nothing to train on,
            forms no update step, or differs in length between ranks.
    """

    def _prepare(
        self, first: int, indices_per_step: Sequence[list[Any]], closed: threading.Event
    ) -> Iterator[UpdateStep]:
        """Yields update steps with these samples of this rank; ``first`` is the index of the first."""
        ranks, fill, names = self.ranks, self._fill, self.collator.counts
        names = [*names, *self._counts_of_datasets]
        together = StepCollectives(names, ranks.is_dp_leader, ranks.dp_peers, self._group, closed)
        exchanges = ranks.dp_degree > 1 and self.settings.moves_samples
        loaded = load_samples(self.dataset, indices_per_step, self.settings.num_workers)
        dummy: Any = None
        for index, indices in enumerate(indices_per_step, start=first):
            collator = self.collator
            length_of, plan, most = collator.length, collator.plan, self.samples_per_rank
            exchange = partial(together.exchange, length_of=length_of, plan=plan, max_samples=most)
            with reporting_failure(exchange if exchanges else together.count):
                with record_function("load"):
                    samples = next(loaded)
                if dummy is None and (ranks.dp_degree > 1 or fill is not None):
                    # Before the ranks agree on the step: nothing may fail after that.
                    dummy = collator.dummy(samples[0] if samples else self.dataset[self.probe.example])
                rows = [] if exchanges else group_samples(samples, length_of, plan)
            if exchanges:
                with record_function("exchange"):
                    rows = exchange(samples)
            with reporting_failure(together.count), record_function("collate"):
                # Only plans over several ranks have rounds without samples.
                microbatches: list[Microbatch] = []
                for row in rows:
                    microbatches += _collate(collator, row) if row.samples else [dummy]
                counts = {n: sum(m.counts.get(n, 0) for m in microbatches) for n in collator.counts}
                sums = self._sums_of(microbatches, rows) if self.dataset.adds_positions else None
                if sums is not None and self._counts_of_datasets:
                    numbers = sums.datasets.bincount(sums.numbers, len(self._counts_of_datasets))
                    counts |= zip(self._counts_of_datasets, map(int, numbers), strict=True)
                num_skipped = len(indices) - len(samples)
                now_ms = time.monotonic_ns() // 1_000_000
                proposal = self.propose_tokens() if self.propose_tokens else 0
                local = RankCounts(counts, len(microbatches), now_ms, num_skipped, proposal)
            with record_function("count"):
                agreed = together.count(local)
            num_to_run = agreed.max_microbatches if fill is None else fill(agreed.max_microbatches)
            microbatches += [dummy] * (num_to_run - len(microbatches))
            step = UpdateStep(
                index,
                microbatches,
                agreed.totals,
                ranks.dp_degree,
                samples_consumed=(index + 1) * self.global_batch_size,
                is_last_of_epoch=index + 1 == self.steps_per_epoch,
                clock_seconds=agreed.clock_seconds,
                num_skipped=agreed.num_skipped,
                sample_sums=sums if self.records_losses else None,
            )
            if self.propose_tokens:
                self.bound_rows(agreed.max_tokens)
            yield self._finished(step)

    def _sums_of(self, microbatches: Sequence[Microbatch], rows: Sequence[Row]) -> SampleSums:
        """Returns the sums by sample of an update step, with the numbers of targets and the datasets."""
        sums = SampleSums(self.global_batch_size)
        for microbatch in microbatches:
            sums.count(microbatch.targets)
        for sample in (sample for row in rows for sample in row.samples):
            sums.datasets[sample["step_position"]] = sample.get("dataset_index", 0)
        return sums

    def _finished(self, step: UpdateStep) -> UpdateStep:
        """Returns an update step with values that depend on all microbatches, in pinned memory on CUDA."""
        microbatches, sums, weights = step.microbatches, step.sample_sums, None
        on_cuda = self.ranks.device.type == "cuda"
        if sums is not None:
            if self._weigh is not None:
                weights = self._weigh([step.totals[name] for name in self._counts_of_datasets])
                weights = weights[sums.datasets]
            if on_cuda:
                sums.datasets = sums.datasets.pin_memory()
            microbatches = [m.with_sample_sums(sums, weights) for m in microbatches]
        if on_cuda:
            microbatches = [microbatch.pin_memory() for microbatch in microbatches]
        return replace(step, microbatches=tuple(microbatches))

    def __init__(
        self,
        dataset: Any,
        collator: Collator,
        settings: DataSettings,
        ranks: Ranks,
        name: str = "dataset",
        fill: Callable[[int], int] | None = None,
        is_drawn: bool = False,
    ) -> None:
        self.collator, self.settings, self.ranks, self._fill = collator, settings, ranks, fill
        self.max_tokens = collator.first_tokens or 0
        """Budget of a microbatch in update steps that are planned from now on, the same on all ranks;
        0 for that of the config."""
        self.propose_tokens: Callable[[], int] | None = None
        """Function that returns this rank's proposal of a budget; the least of all ranks is used."""
        self._group = ranks.prefetch_group if name == "dataset" else ranks.validation_group
        skips_bad = settings.on_bad_sample == "skip"
        self.dataset = CheckedDataset(dataset, name, collator.prepare, skips_bad)
        mixture = self.dataset.mixture
        self._counts_of_datasets: list[str] = []
        self._weigh: Callable[[Sequence[int]], Tensor] | None = None
        if mixture is not None and collator.counts[0] == "target_tokens":
            self._counts_of_datasets = [f"{OF_DATASET}{each}" for each in mixture.names]
            self._weigh = mixture.weigh
        self.records_losses = settings.sample_losses or self._weigh is not None
        """The loss module sums by sample."""
        self.dataset.adds_positions = self.records_losses or bool(self._counts_of_datasets)
        self.global_batch_size = settings.samples_per_update_step(ranks.dp_degree)
        self.shares = shares_of_ranks(self.global_batch_size, ranks.dp_degree)
        """Samples of each rank, the largest share first."""
        self.samples_per_rank = self.shares[0]
        with naming(name):
            if agree_on_length(len(self.dataset), self._group) == 0:
                raise ValueError("it has 0 samples; at least 1 is needed")
            check_draws(self)
            is_drawn = is_drawn and mixture is not None and mixture.weights is not None
            is_training = name == "dataset"
            parts = mixture.lengths if is_drawn and mixture else [len(self.dataset)]
            has_remarks = is_training and ranks.is_zero
            self.probe = probe(self.dataset, collator, parts if is_training else (), has_remarks)
        self.order = self._make_order(mixture if is_drawn else None)

    def _make_order(self, mixture: Mixture | None) -> Order:
        """Returns the order of the training; with ``mixture`` samples are taken by weight."""
        settings, size, name = self.settings, self.global_batch_size, self.dataset.name
        if mixture is not None:
            order = MixtureOrder(mixture, settings, size)
            if problems := [*order.problems(name)]:
                raise ConfigError(*problems)
            return order
        num_samples = len(self.dataset)
        with naming("last_update_step"):
            num_steps = num_update_steps(num_samples, size, settings.last_update_step, settings.max_steps_per_epoch)
        return ShuffledOrder(num_samples, size, num_steps, settings.shuffle, settings.data_seed)

    @property
    def steps_per_epoch(self) -> int:
        """Returns the update steps of each epoch."""
        return self.order.steps_per_epoch

    def fingerprint(self) -> dict[str, Any]:
        """Returns values that must be equal for update steps to contain the same samples."""
        order, settings = self.order, self.settings
        is_lazy = settings.shuffle and len(self.dataset) > NUM_IN_MEMORY
        hashes = content_hashes(self.dataset, self.dataset.name)
        return {
            "num_samples": len(self.dataset),
            "hash_of_samples": self.probe.hash_of_samples,
            **({"content_hash": hashes} if hashes else {}),
            **(order.fingerprint() if isinstance(order, MixtureOrder) else {}),
            **({"order": "feistel"} if is_lazy else {}),
            "global_batch_size": self.global_batch_size,
            "shuffle": settings.shuffle,
            "data_seed": settings.data_seed,
            "last_update_step": settings.last_update_step,
        }

    def epoch(self, epoch: int, samples_consumed: int = 0) -> Prefetched[UpdateStep]:
        """Returns the update steps of an epoch.

        Args:
            epoch: index of the epoch, from 0.
            samples_consumed: samples of the epoch, over all ranks, whose update steps are done.

        Returns:
            A context manager that iterates over :class:`UpdateStep`. It raises errors of the
            dataset or the collator, and on other ranks
            :class:`recipe_utils.update_steps.collectives.OtherRankFailedError`: all ranks stop
            before the same update step.
        """
        first = samples_consumed // self.global_batch_size
        steps = range(first, self.steps_per_epoch)
        return self.of_samples(self._indices(partial(self.order.samples, epoch), steps, epoch), first)

    def bound_rows(self, max_tokens: int) -> None:
        """Plans further update steps with at most ``max_tokens`` per microbatch, the same on all ranks."""
        if max_tokens != self.max_tokens:
            self.max_tokens, self.collator = max_tokens, self.collator.with_bound(max_tokens)

    def one_pass(self, num_epochs: int) -> tuple[int, Prefetched[UpdateStep]]:
        """Returns the number of update steps, and update steps with each sample of some epochs once.

        Samples are in dataset order, ``global_batch_size`` at a time.
        """
        is_used, size = np.zeros(len(self.dataset), dtype=bool), self.global_batch_size
        for epoch in range(num_epochs):
            for step in range(self.steps_per_epoch):
                is_used[self.order.samples(epoch, step)] = True
            if is_used.all():
                break
        used = np.flatnonzero(is_used)
        steps = range(num_update_steps(len(used), size, "train"))
        samples = self._indices(lambda step: used[step * size : (step + 1) * size], steps)
        return len(steps), self.of_samples(samples)

    def _indices(self, items: Callable[[int], Any], steps: range, epoch: int = 0) -> UpdateSteps:
        """Returns this rank's samples of update steps; ``items`` returns those of all ranks."""
        place = self.ranks.dp_rank, self.ranks.dp_degree, getattr(self.collator, "block", 1)
        return UpdateSteps(steps, lambda step: update_step_indices(items(step), epoch, step, *place))

    def of_samples(self, indices_per_step: Sequence[list[Any]], first: int = 0) -> Prefetched[UpdateStep]:
        """Returns update steps of given samples; see :meth:`epoch`.

        Args:
            indices_per_step: dataset indices of this DP rank, possibly none, for each update step;
                every rank must have the same number of update steps.
            first: position of the first update step in its epoch.
        """
        closed = threading.Event()
        steps = self._prepare(first, indices_per_step, closed)
        return Prefetched(steps, self.settings.prefetch_update_steps, closed)


def _collate(collator: Collator, row: Row) -> list[Microbatch]:
    if row.part == WHOLE:
        return list(map(collator.collate, collator.split(row.samples)))
    whole = collator.collate(row.samples)
    return [cut(whole, row.part, len(row.samples), collator.row_multiple)]
