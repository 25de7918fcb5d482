"""Reference of a preference loss: a frozen model, or the policy with the adapters that it started with.

Shapes: p pairs of a microbatch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from zlib import crc32

import numpy as np
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torchtune import config
from torchtune.utils import get_logger
from tqdm import tqdm

from recipe_utils.model_kinds import transformers_decoder
from recipe_utils.models.adapters.lora import find_adapters
from recipe_utils.models.frozen import FrozenModel, build_frozen_model, load_frozen, policy_at_start
from recipe_utils.models.pipeline.microbatches import Pipeline
from recipe_utils.models.pipeline.stages import adapters_of
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.vocabulary import check_same_tokens
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.optim.optimizer import trained_parameters
from recipe_utils.parallel.fsdp import local
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.preference.cache import LogProbs, Pairs, ReferenceCache
from recipe_utils.preference.losses import PreferenceLoss
from recipe_utils.settings.keys import STRICT, FilePath, OnlyWith
from recipe_utils.settings.problems import Problem, problems_with_folder
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.order import Order
from recipe_utils.update_steps.step import Microbatch, UpdateStep

_log = get_logger("INFO")

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


class Reference:
    """Attaches the reference's log-probabilities [2, p] to pairs. All ranks together.

    With ``reference: cached``, :meth:`precompute` stores them before training. ``modules`` and ``checkpointer``, a
    config, are the policy's. Nothing is built or attached if ``loss_fn.needs_reference`` is False.
    """

    def __init__(
        self,
        settings: ReferenceSettings,
        modules: ModelSettings,
        checkpointer: Mapping[str, Any],
        output_dir: Path,
        loss_fn: Any,
        ranks: Ranks,
    ) -> None:
        self._ranks, self._how = ranks, settings.reference
        self._folder = settings.reference_cache_dir or output_dir / "reference"
        self._is_used = getattr(loss_fn, "needs_reference", True)
        adapters = checkpointer.get("adapter_checkpoint")
        self._given_adapters = adapters and Path(checkpointer["output_dir"], adapters)
        self._modules = modules.without_gradients()
        self._build: Callable[[], FrozenModel]
        self._model: FrozenModel | None = None  # with a cache only during the pass
        self._cache: ReferenceCache | None = None
        if not self._is_used and settings.reference != "live" and ranks.is_zero:
            _log.warning(f"reference={settings.reference}: not used, because the loss needs none")

    def check(self, component: Any, meta_model: Any, policy_checkpointer: Any) -> None:
        """Builds the reference's own checkpointer, if ``component`` configures one.

        ``meta_model`` is the policy. Raises ValueError if adapters need no checkpointer,
        or the reference has other tokens.
        """
        checkpointer = config.instantiate(component)
        has_adapters = bool(find_adapters(meta_model).modules)
        if checkpointer is not None and has_adapters:
            raise ValueError("the reference of a model with adapters is what training starts from; leave it out")
        check_same_tokens(policy_checkpointer, checkpointer, ("policy", "reference"))
        self._meta_model, self._checkpointer = meta_model, checkpointer or policy_checkpointer

    def set_up(
        self,
        policy: nn.Module,
        pipeline: Pipeline | None,
        pair_loss: PreferenceLoss,
        longest_row: int,
        context: Mapping[str, Any],
    ) -> dict[str, str]:
        """Builds the reference; with a cache, only when a pair's log-probabilities are missing.

        With adapters it is ``policy`` with the present ones if they were given, else without; otherwise a copy of the
        policy's meta model that ends in ``pair_loss``, with the weights of its own or the policy's checkpointer.
        ``context`` are plain values that log-probabilities depend on besides weights and precision. Returns fingerprints
        of its own weights or of given adapters, so that a resumed training has the same one. Raises ConfigError if the
        weights do not fit the model.
        """
        if not self._is_used:
            return {}
        ranks, modules, device = self._ranks, self._modules, self._ranks.device
        adapters = adapters_of(policy)
        given, start = dict[str, str](), list[Tensor]()
        # With adapters the reference is what training starts from: its base needs no second copy.
        if adapters.modules and self._given_adapters is not None:
            given["checkpointer.adapter_checkpoint"] = f"{crc32(self._given_adapters.read_bytes()):08x}"
            start = [local(p.detach()).clone() for p in trained_parameters(policy).values()]
        at_start = partial(policy_at_start, policy, pipeline, device, start)
        if adapters.modules and self._how == "offload" and ranks.is_zero:
            _log.warning("reference=offload: not used, it shares its base with the trained model")
        if adapters.modules and self._how != "cached":
            self._model = at_start()
            return given
        # Otherwise it is a model of its own, which a cache may not need: weights are read once more then.
        meta_model = None if adapters.modules else self._meta_model
        checkpoint, fingerprints = load_frozen(self._checkpointer, _KEY, meta_model, ranks)
        if self._how == "cached":
            checkpoint = {}

        def own_model() -> FrozenModel:
            return build_frozen_model(
                self._meta_model,
                pair_loss,
                checkpoint or self._checkpointer.load_checkpoint(),
                modules,
                ranks,
                longest_row=longest_row,
                # FSDP2's own offload requires the weights on the CPU.
                is_offloaded=self._how == "offload" and not modules.offloads_to_cpu(device),
                keys=(_KEY, _KEY),
            )

        if self._how != "cached":
            self._model = own_model()
            return fingerprints
        # A cache is used by trainings of which everything that log-probabilities depend on is equal.
        self._build = at_start if adapters.modules else own_model
        context = {
            **context,
            **given,
            "weights": fingerprints[_KEY],
            "dtype": str(modules.torch_dtype),
            "quantised": sorted(name for name, is_nf4 in adapters.frozen.items() if is_nf4),
            "device": device.type,
        }
        if transformers_decoder(self._meta_model) is not None:
            context["config"] = self._meta_model.model.config.to_json_string()
        self._cache = ReferenceCache(self._folder, context, ranks.cpu_group)
        if ranks.is_zero:
            _log.info(f"{self._folder}: log-probabilities of {len(self._cache)} pairs")
        return given if adapters.modules else fingerprints

    # ---- Log-probabilities --------------------------------------------------------------------------

    def precompute(self, num_epochs: int, *loaders: UpdateStepLoader | None) -> None:
        """Stores missing log-probabilities of all pairs of ``num_epochs`` epochs, if there is a cache.

        A killed pass resumes. Raises ConfigError with the file's name if it cannot be written.
        """
        if self._cache is None:
            return
        for loader in filter(None, loaders):
            size = loader.order.end(0, 0)
            one_pass = replace(loader, order=OnePass(loader.order, num_epochs, len(loader.dataset), size))
            num_steps = one_pass.order.num_steps(0)
            with one_pass.epoch(0) as steps:
                for step in tqdm(steps, "reference", num_steps, disable=not self._ranks.is_zero):
                    self._store_missing(step, self._cache)
        self._cache.write()
        self._model = None

    def _store_missing(self, step: UpdateStep, cache: ReferenceCache) -> None:
        """Computes an update step on all ranks if any of its pairs is missing on any of them."""
        pairs = [_pairs_of(microbatch) for microbatch in step.microbatches]
        group = self._ranks.cpu_group
        if all(gather_objects(all(map(cache.contains, pairs)), group)):
            return
        self._model = self._model or self._build()
        log_probs: LogProbs = {}
        for index, output in self._checked_outputs(self._model, step.microbatches).items():
            log_probs |= zip(pairs[index].fingerprints, map(tuple, output.T.tolist()), strict=True)
        # Of equal pairs the first one counts, on all ranks.
        for rank_log_probs in gather_objects(log_probs, group):
            cache.add(rank_log_probs)

    @contextmanager
    def attached(self, step: UpdateStep) -> Iterator[Sequence[Microbatch]]:
        """Yields the microbatches with log-probabilities, computed before any gradient exists.

        They are unchanged on ranks without the last stage, which have no loss. Raises
        NonfiniteError if log-probabilities are NaN or infinite.
        """
        microbatches, log_probs = step.microbatches, dict[int, Tensor]()
        if self._cache is not None and self._ranks.has_last_stage:
            log_probs = {i: self._cache.find(_pairs_of(m)) for i, m in enumerate(microbatches)}
            if self._ranks.device.type == "cuda":  # else copies to the device block the host
                log_probs = {index: both.pin_memory() for index, both in log_probs.items()}
        elif self._model is not None:
            log_probs = self._checked_outputs(self._model, microbatches)
        yield [m.with_outputs(reference=log_probs.get(index)) for index, m in enumerate(microbatches)]

    def _checked_outputs(self, model: FrozenModel, microbatches: Sequence[Microbatch]) -> dict[int, Tensor]:
        """Returns log-probabilities [2, p] by index; empty on ranks without the last stage.

        Raises NonfiniteError for NaN or infinite ones where this costs no extra device synchronization:
        on a CPU and for a cache. Otherwise the gradient is not finite.
        """
        outputs = model.outputs(microbatches)
        is_free = self._cache is not None or self._ranks.device.type == "cpu"
        for index, output in outputs.items() if is_free else ():
            names = _pairs_of(microbatches[index]).names
            for name, both in zip(names, output.T.cpu(), strict=True):
                if not both.isfinite().all():
                    text = f"the reference's log-probabilities of its answers are {both.tolist()}; look at"
                    raise NonfiniteError(f"{name}: {text} ref_checkpointer's weights, or set dtype=fp32")
        return outputs


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
    fingerprints = microbatch.targets.of_samples["fingerprint"][::2]  # the same for both answers
    return Pairs(microbatch.names, [row.tobytes() for row in fingerprints.numpy()])
