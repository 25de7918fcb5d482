"""Reference of a loss: a frozen model, or the policy with the adapters that it started with.

Shapes: n targets and p sequences of a microbatch.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from tqdm import tqdm

from recipe_utils.models.frozen import (
    Attached,
    FrozenModel,
    frozen_copy,
    load_frozen,
    nothing_attached,
    start_of_adapters,
)
from recipe_utils.models.pipeline.stages import adapters_of
from recipe_utils.models.runner import Rows, Runner
from recipe_utils.models.transformers.interface import DecoderOfTransformers
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.reference.cache import LogProbs, ReferenceCache, Sequences
from recipe_utils.settings.keys import STRICT, FilePath, OnlyWith
from recipe_utils.settings.problems import Problem, problems_with_folder
from recipe_utils.text.collator import RowCollator
from recipe_utils.torchtune_names import log_rank_zero
from recipe_utils.training.setup import Built
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.order import Order
from recipe_utils.update_steps.step import Microbatch, Targets, UpdateStep

_KEY = "ref_checkpointer"


@dataclass(frozen=True, config=STRICT)
class ReferenceSettings:
    """Source of the reference's log-probabilities."""

    reference: Literal["live", "offload", "cached"] = "live"
    """``offload`` keeps the model on the CPU between its forwards; ``cached`` stores a number per answer of a pair, or per
    target of a rollout, on disk. Rollouts need none without a KL term and ``advantage: teacher``, or if their file has it."""
    reference_cache_dir: Annotated[FilePath | None, OnlyWith("reference", ("cached",))] = None
    """Folder of ``cached``, shared by all trainings with this reference; null is ``output_dir``/reference."""

    def problems(self) -> Iterator[Problem]:
        """Yields problems with the folder."""
        if self.reference == "cached" and self.reference_cache_dir is not None:
            yield from problems_with_folder("reference_cache_dir", self.reference_cache_dir)


class ComparingLoss(Protocol):
    """Loss module that finds log-probabilities of a reference at ``targets.outputs["reference"]``."""

    returns_sums: bool
    """In :meth:`returning_log_probs`, it returns those of sequences [p], sums over their targets; else of targets [n]."""

    def returning_log_probs(self) -> AbstractContextManager[None]:
        """Makes it return log-probabilities in the block."""


class CachedReference:
    """Attaches log-probabilities from a cache, in which :meth:`precompute` stores them. All ranks together.

    ``build`` makes the model, if a sequence is missing, until the end of that pass.
    """

    def __init__(
        self, cache: ReferenceCache, build: Callable[[], FrozenModel], returns_sums: bool, ranks: Ranks
    ) -> None:
        self._cache, self._build, self._ranks, self._returns_sums = cache, build, ranks, returns_sums
        self._model: FrozenModel | None = None

    def precompute(self, num_epochs: int, *loaders: UpdateStepLoader | None) -> None:
        """Stores missing log-probabilities of all samples of ``num_epochs`` epochs.

        A killed pass resumes. Raises ConfigError with the file's name if it cannot be written, NonfiniteError for NaN
        or infinite ones.
        """
        for loader in filter(None, loaders):
            size = loader.order.end(0, 0)
            one_pass = replace(loader, order=OnePass(loader.order, num_epochs, len(loader.dataset), size))
            num_steps = one_pass.order.num_steps(0)
            with one_pass.epoch(0) as steps:
                for step in tqdm(steps, "reference", num_steps, disable=not self._ranks.is_zero):
                    self._store_missing(step.microbatches)
        self._cache.write()
        self._model = None

    def _store_missing(self, microbatches: Sequence[Microbatch]) -> None:
        """Computes an update step on all ranks if any of its sequences is missing on any of them."""
        sequences, group = [*map(_sequences_of, microbatches)], self._ranks.cpu_group
        if all(gather_objects(all(map(self._cache.contains, sequences)), group)):
            return
        self._model = self._model or self._build()
        outputs = self._model.outputs(microbatches)
        self._model.check(microbatches, outputs)
        log_probs: LogProbs = {}
        for index, output in outputs.items():
            order, numbers = self._places(microbatches[index].targets)
            values = output.cpu().double()[order].split(numbers)
            of_sequences = (each.numpy().tobytes() for each in values)
            log_probs |= zip(sequences[index].fingerprints, of_sequences, strict=True)
        # Of equal sequences the first one counts, on all ranks.
        for rank_log_probs in gather_objects(log_probs, group):
            self._cache.add(rank_log_probs)

    def _places(self, targets: Targets) -> tuple[Tensor, list[int]]:
        """Returns the places [k] of what is stored, one sequence after the other, and the number of each."""
        num_sequences = len(targets.of_samples["fingerprint"])
        # Along a sequence, targets are in the order of the row.
        owners = torch.arange(num_sequences) if self._returns_sums else targets.sequences
        return owners.argsort(stable=True), torch.bincount(owners, minlength=num_sequences).tolist()

    @contextmanager
    def attached(self, step: UpdateStep) -> Iterator[Sequence[Microbatch]]:
        """Yields the microbatches with log-probabilities. Raises CheckpointError for a sample that has none."""
        found = []
        for microbatch in step.microbatches:
            stored, (order, _) = self._cache.find(_sequences_of(microbatch)), self._places(microbatch.targets)
            found.append(torch.empty_like(stored).index_copy_(0, order, stored))
        if self._ranks.device.type == "cuda":  # else copies to the device block the host
            found = [log_probs.pin_memory() for log_probs in found]
        yield [m.with_outputs(reference=log_probs) for m, log_probs in zip(step.microbatches, found, strict=True)]


class Reference(NamedTuple):
    """Pass that attaches log-probabilities, [p] or [n], its fingerprints for a resume, and the cache, if there is one."""

    attached: Attached = nothing_attached
    fingerprints: Mapping[str, str] = {}
    cache: CachedReference | None = None

    def precompute(self, num_epochs: int, *loaders: UpdateStepLoader | None) -> None:
        """Fills the cache, if there is one; see :meth:`CachedReference.precompute`."""
        if self.cache is not None:
            self.cache.precompute(num_epochs, *loaders)


def build_reference(
    settings: ReferenceSettings,
    built: Built,
    policy: Runner,
    loss_fn: ComparingLoss,
    rows: Rows,
    collator: RowCollator,
    is_needed: bool = True,
) -> Reference:
    """Returns the reference of a policy; none unless it ``is_needed``.

    With adapters it is ``policy`` with the present ones if they were given, else without; otherwise a copy of the model
    that ends in ``loss_fn``, with the weights of ``built.ref_checkpointer``. ``collator`` lays out the rows, on which the
    rounding of log-probabilities in a cache depends. Raises ConfigError if the weights do not fit the model.
    """
    how, warn = settings.reference, partial(log_rank_zero, level=logging.WARNING)
    if not is_needed:
        if how != "live":
            warn(f"reference={how}: not used, because the loss needs none")
        return Reference()
    ranks, modules = built.run.ranks, built.settings.model
    meta_model, checkpointer = built.meta_model, built.ref_checkpointer
    same = start_of_adapters(policy, "reference", built.cfg.checkpointer)
    if same is not None and how == "offload":
        warn("reference=offload: not used, it shares its base with the trained model")

    def build() -> FrozenModel:
        model = same or frozen_copy(
            *("reference", meta_model, loss_fn, checkpointer, modules, ranks, rows),
            # FSDP2's own offload requires the weights on the CPU.
            is_offloaded=how == "offload" and not modules.offloads_to_cpu(ranks.device),
            keys=(_KEY, _KEY),
        )
        return replace(model, returning=loss_fn.returning_log_probs, explain=_explain)

    if how != "cached":
        model = build()
        return Reference(model.attached, model.fingerprints)
    # A cache is used by trainings of which everything that log-probabilities depend on is equal.
    _, fingerprints = load_frozen(checkpointer, _KEY, meta_model, ranks, checks=same is None)
    given: Mapping[str, str] = {} if same is None else same.fingerprints
    is_packed = collator.settings.is_packed
    context: dict[str, Any] = {
        "model": built.settings.components.model,
        "layout": f"packed{', beginnings shared' * (collator.trees is not None)}" if is_packed else "padded",
        **given,
        "weights": fingerprints[_KEY],
        "dtype": str(modules.torch_dtype),
        "quantised": sorted(name for name, is_nf4 in adapters_of(policy.module).frozen.items() if is_nf4),
        "device": ranks.device.type,
    }
    if isinstance(meta_model, DecoderOfTransformers):
        context["config"] = meta_model.model.config.to_json_string()
    folder = settings.reference_cache_dir or built.settings.run.output_dir / "reference"
    cached = ReferenceCache(folder, context, ranks.cpu_group)
    log_rank_zero(f"{folder}: log-probabilities of {len(cached)} answers")
    reference = CachedReference(cached, build, loss_fn.returns_sums, ranks)
    return Reference(reference.attached, fingerprints if same is None else given, reference)


class OnePass(Order):
    """One epoch with the samples of the first ``num_epochs`` of an ``order``, each once, in dataset order."""

    def __init__(self, order: Order, num_epochs: int, num_samples: int, global_batch_size: int) -> None:
        is_used = np.zeros(num_samples, dtype=bool)
        for epoch in range(num_epochs):
            for step in range(order.num_steps(epoch)):
                is_used[order.samples(epoch, step)] = True
            if is_used.all():
                break
        self._indices, self._size = np.flatnonzero(is_used), global_batch_size

    def num_steps(self, epoch: int) -> int:
        """Returns the number of update steps."""
        return -(-len(self._indices) // self._size)

    def samples(self, epoch: int, step: int) -> np.ndarray:
        """Returns dataset indices, ascending."""
        return self._indices[step * self._size : (step + 1) * self._size]

    def end(self, epoch: int, step: int) -> int:
        """Returns whole update steps."""
        return (step + 1) * self._size


def _sequences_of(microbatch: Microbatch) -> Sequences:
    fingerprints = microbatch.targets.of_samples["fingerprint"].numpy()
    return Sequences(_names_of(microbatch), [row.tobytes() for row in fingerprints])


def _names_of(microbatch: Microbatch) -> list[str]:
    """Returns the name of each sequence's sample; those of one sample stand together."""
    assert microbatch.targets.samples is not None
    _, numbers = microbatch.targets.samples.unique_consecutive(return_inverse=True)
    return [microbatch.names[number] for number in numbers.tolist()]


def _explain(microbatch: Microbatch, log_probs: Tensor) -> str:
    """Names the sample of the first log-probability that is NaN or infinite."""
    targets, place = microbatch.targets, int((~log_probs.cpu().isfinite()).nonzero()[0])
    if len(log_probs) != len(targets.of_samples["fingerprint"]):
        place = int(targets.sequences[place])
    text = f"{_names_of(microbatch)[place]}: the reference's log-probabilities are NaN or infinite; look at"
    return f"{text} ref_checkpointer's weights, or set dtype=fp32"
