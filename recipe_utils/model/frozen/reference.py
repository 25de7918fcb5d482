"""Reference of a preference loss: a frozen model, or the policy without its adapters.

Shapes: p pairs of a microbatch.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torchtune import config, training
from torchtune.utils import get_logger

from recipe_utils.data.loader.loader import UpdateStepLoader
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.pairs.collator import PairCollator
from recipe_utils.model.adapters.adapters import find_adapters
from recipe_utils.model.build.build import ModelSettings
from recipe_utils.model.build.weights import (
    check_weights,
    crc32_of_weights,
    fingerprint_of_config,
)
from recipe_utils.model.frozen.cache import Values
from recipe_utils.model.frozen.model import FrozenModel, context_of, policy_without_adapters
from recipe_utils.model.frozen.outputs import FrozenOutputs, OutputKind
from recipe_utils.model.frozen.vocabulary import check_same_tokens
from recipe_utils.model.pipeline.pipeline import Pipeline
from recipe_utils.model.pipeline.stages import adapters_of
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.keys import STRICT, FilePath, OnlyWith
from recipe_utils.settings.problems import Problem, naming, problems_with_folder

_log = get_logger("INFO")


@dataclass(frozen=True, config=STRICT)
class ReferenceSettings:
    """Source of the reference's log-probabilities."""

    reference: Literal["live", "offload", "cached"] = "live"
    """``live``: computed by a model that stays on the device; ``offload``: by a model that is on
    the device only during its forwards; ``cached``: computed once per pair and stored on disk."""
    reference_cache_dir: Annotated[FilePath | None, OnlyWith("reference", ("cached",))] = None
    """Folder of ``cached``, shared by all trainings with this reference; null is
    ``output_dir``/reference."""
    precompute_reference: Annotated[bool, OnlyWith("reference", ("cached",))] = False
    """Fills the cache in one pass over the data before training, instead of at update steps."""

    def problems(self) -> Iterator[Problem]:
        """Yields problems with the folder."""
        if self.reference == "cached" and self.reference_cache_dir is not None:
            yield from problems_with_folder("reference_cache_dir", self.reference_cache_dir)


class Reference:
    """Attaches the reference's log-probabilities [2, p] to pairs. All ranks together.

    ``settings`` are the recipe's. Nothing is built or attached if ``loss_fn.needs_reference`` is
    False.
    """

    def __init__(self, settings: Any, loss_fn: Any, ranks: Ranks) -> None:
        own: ReferenceSettings = settings
        self._settings = own
        self._modules: ModelSettings = settings.without_gradients()
        self._ranks = ranks
        self._checkpointer: Any = None
        self._is_cached = own.reference == "cached"
        kind = OutputKind(
            name="reference",
            cache_key="reference_cache_dir",
            numbers_of=lambda pair: {key: pair[key] for key in PairCollator.fingerprint_keys},
            to_values=self._to_values,
            attach=_attach,
            needs_output_layer=False,
            is_small=True,
        )
        folder = Path(own.reference_cache_dir or Path(settings.output_dir, "reference"))
        self.outputs = FrozenOutputs(kind, folder if self._is_cached else None, ranks)
        """Attaches nothing if the loss needs no reference."""
        self._is_used = getattr(loss_fn, "needs_reference", True)
        self.cached = self.outputs if self._is_cached and self._is_used else None
        """Outputs in which a collator looks up log-probabilities; None without a cache."""
        if not self._is_used and own.reference != "live" and ranks.is_zero:
            _log.warning(f"reference={own.reference}: not used, because the loss needs none")

    def check(self, component: Any, whole: nn.Module, tokenizer: Any) -> None:
        """Builds the reference's own checkpointer, if ``component`` configures one.

        ``whole`` is the policy, on any device. Raises ValueError if adapters need no checkpointer,
        or the ``tokenizer.json`` beside the reference's weights has other tokens than ``tokenizer``.
        """
        checkpointer = config.instantiate(component)
        has_adapters = bool(find_adapters(whole).modules)
        if checkpointer is not None and has_adapters:
            raise ValueError(
                "the reference of a model with adapters is the model without them; leave it out"
            )
        folder = getattr(checkpointer, "_checkpoint_dir", None)
        if folder is not None and Path(folder, "tokenizer.json").is_file():
            check_same_tokens(tokenizer, None, str(folder), ("policy", "reference"))
        self._whole, self._checkpointer = whole, checkpointer

    def set_up(
        self,
        policy: nn.Module,
        pipeline: Pipeline | None,
        build: Callable[..., FrozenModel],
        policy_checkpointer: Any,
        context: Mapping[str, Any],
    ) -> dict[str, str]:
        """Builds the reference; with a cache, only when a pair's log-probabilities are missing.

        With adapters it is ``policy``, otherwise a model of ``build``, with the weights of its own
        or the policy's checkpointer. ``context`` are plain values that log-probabilities depend on
        besides weights and precision. Returns the checksum of a reference's own weights, so that a
        resumed training has the same one. Raises ConfigError if the weights do not fit the model.
        """
        if not self._is_used:
            return {}
        modules = self._modules
        load = (self._checkpointer or policy_checkpointer).load_checkpoint
        adapters = adapters_of(policy)
        without_adapters = partial(policy_without_adapters, policy, pipeline, self._ranks.device)
        if adapters.modules and self._settings.reference == "offload" and self._ranks.is_zero:
            _log.warning("reference=offload: not used, the model without adapters is the reference")
        if adapters.modules and not self._is_cached:
            self.outputs.set_up(without_adapters, {})
            return {}
        with naming("ref_checkpointer"):
            checkpoint = load()
            weights = checkpoint[training.MODEL_KEY]
            crc32 = crc32_of_weights(weights, self._ranks.cpu_group)
            if not adapters.modules:
                check_weights(self._whole, weights)
                own = self._checkpointer or policy_checkpointer
                fingerprint_of_config(self._whole, getattr(own, "_checkpoint_dir", None))

        def own_model() -> FrozenModel:
            nonlocal checkpoint
            given, checkpoint = checkpoint or load(), {}  # a reference here would keep the weights
            return build(
                checkpoint=given,
                modules=modules,
                # FSDP2's own offload requires the weights on the CPU.
                is_offloaded=self._settings.reference != "live"
                and not modules.offloads_to_cpu(self._ranks.device),
                keys=("ref_checkpointer", "ref_checkpointer"),
            )

        if self._is_cached:
            checkpoint = {}
        context = {
            **context,
            **context_of(self._whole),
            "weights": crc32,
            "dtype": str(modules.torch_dtype),
            "quantised": sorted(name for name, is_nf4 in adapters.frozen.items() if is_nf4),
        }
        del weights
        self.outputs.set_up(without_adapters if adapters.modules else own_model, context)
        return {} if adapters.modules else {"ref_checkpointer": crc32}

    def precompute(self, num_epochs: int, *loaders: UpdateStepLoader | None) -> None:
        """Fills the cache for ``num_epochs`` epochs if ``precompute_reference``."""
        if self._settings.precompute_reference:
            self.outputs.precompute(num_epochs, *loaders)

    def _to_values(self, log_probs: Tensor, _: Any, microbatch: Microbatch) -> Values:
        """Transposes log-probabilities [2, p] to one row per pair.

        Raises NonfiniteError for NaN or infinite ones where this costs no extra device synchronization:
        on a CPU and for a cache. Otherwise the gradient is not finite.
        """
        if self._is_cached or self._ranks.device.type == "cpu":
            pairs = microbatch.targets.pairs
            for name, of_pair in zip(pairs.names if pairs else (), log_probs.T.cpu(), strict=True):
                if not of_pair.isfinite().all():
                    raise NonfiniteError(
                        f"{name}: the reference's log-probabilities of its answers are {of_pair.tolist()}; look "
                        "at ref_checkpointer's weights, or set dtype=fp32"
                    )
        return {"log_probs": log_probs.T}


def _attach(values: Values, _: Any) -> Tensor:
    if not values:  # a dummy microbatch and an empty cache
        return torch.zeros(2, 0, dtype=torch.float64)
    return values["log_probs"].T
