"""Reference of a preference loss: a frozen model, or the policy with the adapters that it started with.

Shapes: p pairs of a microbatch.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
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
from recipe_utils.preference.cache import LogProbs, Pairs, ReferenceCache
from recipe_utils.preference.pair_losses import PreferenceLoss
from recipe_utils.preference.pairs import PairSettings, layout_of
from recipe_utils.settings.keys import STRICT, FilePath, OnlyWith
from recipe_utils.settings.problems import Problem, problems_with_folder
from recipe_utils.torchtune_names import log_rank_zero
from recipe_utils.training.setup import Built
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.order import Order
from recipe_utils.update_steps.step import Microbatch, UpdateStep

_KEY = "ref_checkpointer"


@dataclass(frozen=True, config=STRICT)
class ReferenceSettings:
    """Source of the reference's log-probabilities."""

    reference: Literal["live", "offload", "cached"] = "live"
    """``offload`` keeps the model on the CPU between its forwards; ``cached`` stores two numbers per pair on disk."""
    reference_cache_dir: Annotated[FilePath | None, OnlyWith("reference", ("cached",))] = None
    """Folder of ``cached``, shared by all trainings with this reference; null is ``output_dir``/reference."""

    def problems(self) -> Iterator[Problem]:
        """Yields problems with the folder."""
        if self.reference == "cached" and self.reference_cache_dir is not None:
            yield from problems_with_folder("reference_cache_dir", self.reference_cache_dir)


class CachedReference:
    """Attaches log-probabilities [2, p] from a cache, in which :meth:`precompute` stores them. All ranks together.

    ``build`` makes the model, if a pair is missing, until the end of that pass.
    """

    def __init__(self, cache: ReferenceCache, build: Callable[[], FrozenModel], ranks: Ranks) -> None:
        self._cache, self._build, self._ranks = cache, build, ranks
        self._model: FrozenModel | None = None

    def precompute(self, num_epochs: int, *loaders: UpdateStepLoader | None) -> None:
        """Stores missing log-probabilities of all pairs of ``num_epochs`` epochs.

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
        """Computes an update step on all ranks if any of its pairs is missing on any of them."""
        pairs, group = [*map(_pairs_of, microbatches)], self._ranks.cpu_group
        if all(gather_objects(all(map(self._cache.contains, pairs)), group)):
            return
        self._model = self._model or self._build()
        outputs = self._model.outputs(microbatches)
        self._model.check(microbatches, outputs)
        log_probs: LogProbs = {}
        for index, output in outputs.items():
            log_probs |= zip(pairs[index].fingerprints, map(tuple, output.T.tolist()), strict=True)
        # Of equal pairs the first one counts, on all ranks.
        for rank_log_probs in gather_objects(log_probs, group):
            self._cache.add(rank_log_probs)

    @contextmanager
    def attached(self, step: UpdateStep) -> Iterator[Sequence[Microbatch]]:
        """Yields the microbatches with log-probabilities. Raises CheckpointError for a pair that has none."""
        found = [self._cache.find(_pairs_of(microbatch)) for microbatch in step.microbatches]
        if self._ranks.device.type == "cuda":  # else copies to the device block the host
            found = [log_probs.pin_memory() for log_probs in found]
        yield [m.with_outputs(reference=log_probs) for m, log_probs in zip(step.microbatches, found, strict=True)]


class Reference(NamedTuple):
    """Pass that attaches log-probabilities [2, p], its fingerprints for a resume, and the cache, if there is one."""

    attached: Attached = nothing_attached
    fingerprints: Mapping[str, str] = {}
    cache: CachedReference | None = None

    def precompute(self, num_epochs: int, *loaders: UpdateStepLoader | None) -> None:
        """Fills the cache, if there is one; see :meth:`CachedReference.precompute`."""
        if self.cache is not None:
            self.cache.precompute(num_epochs, *loaders)


def build_reference(
    settings: ReferenceSettings,
    pairs: PairSettings,
    built: Built,
    policy: Runner,
    pair_loss: PreferenceLoss,
    rows: Rows,
) -> Reference:
    """Returns the reference of a policy.

    With adapters it is ``policy`` with the present ones if they were given, else without; otherwise a copy of the model
    that ends in ``pair_loss``, with the weights of ``built.ref_checkpointer``; none if the loss needs none. Raises
    ConfigError if the weights do not fit the model.
    """
    how, warn = settings.reference, partial(log_rank_zero, level=logging.WARNING)
    if not getattr(pair_loss.loss_fn, "needs_reference", True):
        if how != "live":
            warn(f"reference={how}: not used, because the loss needs none")
        return Reference()
    ranks, modules = built.run.ranks, built.settings.model
    meta_model, checkpointer = built.meta_model, built.ref_checkpointer
    build = partial(
        frozen_copy,
        *("reference", meta_model, pair_loss, checkpointer, modules, ranks, rows),
        # FSDP2's own offload requires the weights on the CPU.
        is_offloaded=how == "offload" and not modules.offloads_to_cpu(ranks.device),
        keys=(_KEY, _KEY),
        explain=_explain,
    )
    given: Mapping[str, str] = {}
    if (same := start_of_adapters(policy, "reference", built.cfg.checkpointer)) is not None:
        if how == "offload":
            warn("reference=offload: not used, it shares its base with the trained model")
        given, build = same.fingerprints, partial(replace, same, explain=_explain)
    if how != "cached":
        model = build()
        return Reference(model.attached, model.fingerprints)
    # A cache is used by trainings of which everything that log-probabilities depend on is equal.
    _, fingerprints = load_frozen(checkpointer, _KEY, meta_model if same is None else None, ranks)
    context: dict[str, Any] = {
        "model": built.settings.components.model,
        "layout": layout_of(built.settings.data, pairs.prefix_sharing),
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
    log_rank_zero(f"{folder}: log-probabilities of {len(cached)} pairs")
    reference = CachedReference(cached, build, ranks)
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


def _pairs_of(microbatch: Microbatch) -> Pairs:
    fingerprints = microbatch.targets.of_samples["fingerprint"][::2].numpy()  # the same for both answers
    return Pairs(microbatch.names, [row.tobytes() for row in fingerprints])


def _explain(microbatch: Microbatch, log_probs: Tensor) -> str:
    """Names the first pair with a log-probability that is NaN or infinite."""
    pairs = zip(microbatch.names, log_probs.T.cpu(), strict=True)
    name, both = next((name, both) for name, both in pairs if not both.isfinite().all())
    text = f"{name}: the reference's log-probabilities of its answers are {both.tolist()}; look at"
    return f"{text} ref_checkpointer's weights, or set dtype=fp32"
