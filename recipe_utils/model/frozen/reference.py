"""Reference of a preference loss: a frozen model, or the policy with the adapters that it started with.

Shapes: p pairs of a microbatch.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from zlib import crc32

from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torchtune import config
from torchtune.utils import get_logger

from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.samples import Sample
from recipe_utils.data.pairs.collator import PairCollator
from recipe_utils.model.adapters.adapters import find_adapters
from recipe_utils.model.construct.build import ModelSettings
from recipe_utils.model.frozen.cache import Values
from recipe_utils.model.frozen.model import FrozenModel, context_of, policy_at_start
from recipe_utils.model.frozen.outputs import FrozenOutputs
from recipe_utils.model.frozen.vocabulary import check_same_tokens
from recipe_utils.model.pipeline.pipeline import Pipeline
from recipe_utils.model.pipeline.stages import adapters_of
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.optim.optimizer import trained_parameters
from recipe_utils.parallel.fsdp import local
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.keys import STRICT, FilePath, OnlyWith
from recipe_utils.settings.problems import Problem, problems_with_folder

_log = get_logger("INFO")


@dataclass(frozen=True, config=STRICT)
class ReferenceSettings:
    """Source of the reference's log-probabilities."""

    reference: Literal["live", "offload", "cached"] = "live"
    """``live``: a model that stays on the device; ``offload``: on the device only during its
    forwards; ``cached``: computed once per pair and stored on disk."""
    reference_cache_dir: Annotated[FilePath | None, OnlyWith("reference", ("cached",))] = None
    """Folder of ``cached``, shared by all trainings with this reference; null is
    ``output_dir``/reference."""
    precompute_reference: Annotated[bool, OnlyWith("reference", ("cached",))] = False
    """No effect: the cache is always filled in one pass over the data before training."""

    def problems(self) -> Iterator[Problem]:
        """Yields problems with the folder."""
        if self.reference == "cached" and self.reference_cache_dir is not None:
            yield from problems_with_folder("reference_cache_dir", self.reference_cache_dir)


class Reference(FrozenOutputs):
    """Attaches the reference's log-probabilities [2, p] to pairs. All ranks together.

    ``settings`` are the recipe's. Nothing is built or attached if ``loss_fn.needs_reference`` is
    False.
    """

    name = "reference"
    checkpointer_key = "ref_checkpointer"
    cache_key = "reference_cache_dir"
    needs_output_layer = False

    def __init__(self, settings: Any, loss_fn: Any, ranks: Ranks) -> None:
        own: ReferenceSettings = settings
        folder = own.reference_cache_dir or Path(settings.output_dir, "reference")
        is_used = getattr(loss_fn, "needs_reference", True)
        super().__init__(ranks, is_used, Path(folder) if own.reference == "cached" else None)
        self._is_offloaded = own.reference == "offload"
        given = settings.checkpointer.get("adapter_checkpoint")
        self._given = given and Path(settings.checkpointer["output_dir"], given)
        self._modules: ModelSettings = settings.without_gradients()
        if not is_used and own.reference != "live" and ranks.is_zero:
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
                "the reference of a model with adapters is what training starts from; leave it out"
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

        With adapters it is ``policy`` with the present ones if they were given, else without; otherwise
        a model of ``build``, with the weights of its own or the policy's checkpointer. ``context`` are
        plain values that log-probabilities depend on besides weights and precision. Returns fingerprints
        of its own weights or of given adapters, so that a resumed training has the same one. Raises
        ConfigError if the weights do not fit the model.
        """
        if not self.is_used:
            return {}
        modules, device = self._modules, self.ranks.device
        checkpointer = self._checkpointer or policy_checkpointer
        adapters = adapters_of(policy)
        given, start = dict[str, str](), list[Tensor]()
        if adapters.modules and self._given is not None:
            given["checkpointer.adapter_checkpoint"] = f"{crc32(self._given.read_bytes()):08x}"
            start = [local(p.detach()).clone() for p in trained_parameters(policy).values()]
        at_start = partial(policy_at_start, policy, pipeline, device, start)
        if adapters.modules and self._is_offloaded and self.ranks.is_zero:
            _log.warning("reference=offload: not used, it shares its base with the trained model")
        if adapters.modules and not self.is_cached:
            self.open(at_start, {})
            return given
        checkpoint, fingerprints = self.load(
            checkpointer, None if adapters.modules else self._whole
        )
        if self.is_cached:
            checkpoint = {}

        def own_model() -> FrozenModel:
            return build(
                checkpoint=checkpoint or checkpointer.load_checkpoint(),
                modules=modules,
                # FSDP2's own offload requires the weights on the CPU.
                is_offloaded=self._is_offloaded and not modules.offloads_to_cpu(device),
                keys=(self.checkpointer_key, self.checkpointer_key),
            )

        context = {
            **context,
            **context_of(self._whole),
            **given,
            "weights": fingerprints[self.checkpointer_key],
            "dtype": str(modules.torch_dtype),
            "quantised": sorted(name for name, is_nf4 in adapters.frozen.items() if is_nf4),
        }
        self.open(at_start if adapters.modules else own_model, context)
        return given if adapters.modules else fingerprints

    def numbers_of(self, sample: Sample) -> Mapping[str, Any]:
        """Returns tokens and labels of both sides of a pair."""
        return {key: sample[key] for key in PairCollator.fingerprint_keys}

    def to_values(self, output: Tensor, layer: Any, microbatch: Microbatch) -> Values:
        """Transposes log-probabilities [2, p] to one row per pair.

        Raises NonfiniteError for NaN or infinite ones where this costs no extra device synchronization:
        on a CPU and for a cache. Otherwise the gradient is not finite.
        """
        if self.checks_outputs and (self.is_cached or self.ranks.device.type == "cpu"):
            pairs = microbatch.targets.pairs
            for name, of_pair in zip(pairs.names if pairs else (), output.T.cpu(), strict=True):
                if not of_pair.isfinite().all():
                    raise NonfiniteError(
                        f"{name}: the reference's log-probabilities of its answers are {of_pair.tolist()}; look "
                        "at ref_checkpointer's weights, or set dtype=fp32"
                    )
        return {"log_probs": output.T}

    def attach(self, values: Values, layer: Any) -> Tensor:
        """Returns log-probabilities [2, p]."""
        return values["log_probs"].T
