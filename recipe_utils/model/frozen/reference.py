"""The reference of a preference loss: a frozen model, or a policy without its adapters, or what is known of either.

Shapes: p pairs of a microbatch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torchtune import training
from torchtune.modules.peft import disable_adapter
from torchtune.utils import get_logger

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.model.adapters.adapters import find_adapters
from recipe_utils.model.build.build import ModelSettings
from recipe_utils.model.build.weights import check_weights, crc32_of_weights, load_weights
from recipe_utils.model.frozen.reference_cache import ReferenceCache
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.keys import STRICT, FilePath
from recipe_utils.settings.problems import Problem, naming, problems_with_folder

_log = get_logger("INFO")

_SHARE_SECONDS = 60.0
"""How much of the computing of log-probabilities a killed training may lose."""


@dataclass(frozen=True, config=STRICT)
class ReferenceSettings:
    """Where the reference's log-probabilities come from."""

    reference: Literal["live", "offload", "cached"] = "live"
    """``live``: of a model that stays on the device; ``offload``: that is there between update steps only;
    ``cached``: of each pair computed once, and kept on the disk."""
    reference_cache_dir: FilePath | None = None
    """Where ``cached`` keeps them, for any training with this reference; null is ``output_dir``/reference."""
    precompute_reference: bool = False
    """With ``cached``: in one pass over all data before training, not as it goes."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong between the keys, and whether the folder can be written to."""
        if self.reference != "cached":
            for key in ("reference_cache_dir", "precompute_reference"):
                if getattr(self, key):
                    yield Problem(
                        key,
                        f"reference={self.reference} keeps nothing; set reference=cached",
                        getattr(self, key),
                        depends_on=("reference",),
                    )
        elif self.reference_cache_dir is not None:
            yield from problems_with_folder("reference_cache_dir", self.reference_cache_dir)


class Reference:
    """Says what the reference thinks of pairs, once for each where it is cached.

    Whether any rank must compute something is agreed on with an update step's counts, so all ranks do, or
    none. The model is built when it is first needed.

    Args:
        settings: of the reference.
        loss_fn: whose it is. Its log-probabilities are zeros if ``loss_fn.needs_reference`` is False.
        output_dir: of the training.
        ranks: of the job.
    """

    def __init__(
        self, settings: ReferenceSettings, loss_fn: Any, output_dir: Path, ranks: Ranks
    ) -> None:
        self._settings = settings
        self._folder = Path(settings.reference_cache_dir or Path(output_dir, "reference"))
        self._is_needed = getattr(loss_fn, "needs_reference", True)
        self._ranks = ranks
        self._group = ranks.new_cpu_group()
        self._cache: ReferenceCache | None = None
        self._policy: nn.Module | None = None  # if it is the reference, without its adapters
        self._build: Callable[[], nn.Module] | None = None  # where it may never be needed
        self._model: nn.Module | None = None
        self._moves = False  # the model, to the device and back
        self._has_new = False  # on any rank
        self._shared_seconds: float | None = None  # by rank 0's clock
        if not self._is_needed and settings.reference != "live" and ranks.is_zero:
            _log.warning(f"reference={settings.reference}: not used, because the loss needs none")

    def check(
        self, make_checkpointer: Callable[[], Any], whole: nn.Module, resumes_from_stock: bool
    ) -> Any:
        """The reference's checkpointer; None if it has none of its own.

        Args:
            make_checkpointer: returns it.
            whole: the policy, on any device.
            resumes_from_stock: whether the policy's checkpointer holds weights that were trained already.

        Raises:
            ValueError: it has one, but is the policy without adapters; or has none, and should.
        """
        made = make_checkpointer()
        has_adapters = bool(find_adapters(whole).modules)
        if made is not None and has_adapters:
            raise ValueError(
                "the reference of a model with adapters is the model without them; leave it out"
            )
        if made is None and resumes_from_stock and not has_adapters and self._is_needed:
            raise ValueError(
                "it is missing, and checkpointer holds weights that a stock recipe has trained; set it to the "
                "checkpointer of the weights that the training began with"
            )
        return made

    def set_up(
        self,
        policy: nn.Module,
        make: Callable[[ModelSettings, Ranks], nn.Module],
        load: Callable[[], dict[str, Any]],
        settings: ModelSettings,
        depends_on: Mapping[str, Any],
    ) -> dict[str, str]:
        """Says where the reference comes from; builds it, unless nothing may have to be computed.

        Args:
            policy: the trained model, with its weights. With adapters it is the reference, too.
            make: builds a model on the meta device, wrapped and sharded.
            load: reads the reference's full weights, by torchtune's keys.
            settings: of the policy. Where no gradient is kept, nothing is recomputed.
            depends_on: what its log-probabilities depend on besides weights and precision, as plain values.

        Returns:
            What a reference of its own is known by, so that a resumed training has the same one.

        Raises:
            recipe_utils.settings.problems.ConfigError: its weights do not fit the model.
        """
        if not self._is_needed:
            return {}
        settings = settings.without_gradients()
        # FSDP2's own offload keeps weights on the CPU and takes no others.
        self._moves = self._settings.reference != "live" and not settings.offloads_to_cpu(
            self._ranks.device
        )
        adapters = find_adapters(policy)
        is_cached = self._settings.reference == "cached"
        if adapters.modules:
            self._policy = policy
            if self._settings.reference == "offload" and self._ranks.is_zero:
                _log.warning(
                    "reference=offload: not used, the model without adapters is the reference"
                )
            if not is_cached:
                return {}

        def build(checkpoint: dict[str, Any]) -> nn.Module:
            model = make(settings, self._ranks)
            load_weights(model, checkpoint, settings, self._ranks.device)
            return model.requires_grad_(False).eval()

        with naming("ref_checkpointer"):
            checkpoint = load()
            crc32 = crc32_of_weights(checkpoint[training.MODEL_KEY], self._group)
            if not adapters.modules and not is_cached:
                self._model = build(checkpoint)
            elif not adapters.modules:
                check_weights(make(settings, self._ranks), checkpoint[training.MODEL_KEY])
                self._build = lambda: build(load())
        if is_cached:
            context = {
                **depends_on,
                "weights": crc32,
                "dtype": str(settings.torch_dtype),
                "quantised": sorted(name for name, is_nf4 in adapters.frozen.items() if is_nf4),
                "device": self._ranks.device.type,
            }
            self._cache = ReferenceCache(self._folder, context, self._group)
            if self._ranks.is_zero:
                _log.info(f"{self._folder}: the reference is known of {len(self._cache)} pairs")
        return {} if adapters.modules else {"ref_checkpointer": crc32}

    # ---- What is known: asked by the thread that makes microbatches ----------------------------------

    def key_of(self, pair: Mapping[str, Any]) -> bytes:
        """What a pair's log-probabilities are known by."""
        return self._cache.key_of(pair) if self._cache is not None else b""

    def find(self, keys: Sequence[bytes]) -> Tensor:
        """Log-probabilities [2, p] that need not be computed; NaN where they must be."""
        if self._cache is not None:
            return self._cache.find(keys)
        value = float("nan") if self._is_needed else 0.0
        return torch.full((2, len(keys)), value, dtype=torch.float64)

    # ---- What is computed ---------------------------------------------------------------------------

    @contextmanager
    def on_device(self) -> Iterator[nn.Module]:
        """The reference, on the device until the end of the block; all ranks together."""
        if self._policy is not None:
            was_training = self._policy.training
            self._policy.eval()
            try:
                with disable_adapter(self._policy):
                    yield self._policy
            finally:
                self._policy.train(was_training)
            return
        if self._model is None:
            assert self._build is not None
            self._model = self._build()
        if not self._moves:
            yield self._model
            return
        try:
            yield self._model.to(self._ranks.device)
        finally:
            self._model.cpu()

    def unknown(self, step: UpdateStep) -> list[Microbatch]:
        """What the reference must compute of an update step; as many microbatches on every rank."""
        if step.totals["unknown_pairs"] == 0:
            return []
        if self._cache is None:
            return list(step.microbatches)
        unknown = [part for part in map(_unknown_of, step.microbatches) if part is not None]
        most = max(gather_objects(len(unknown), self._group))
        # Every rank must run the same forwards; what a rank runs besides is dropped.
        return unknown + [step.microbatches[0]] * (most - len(unknown))

    def keep(self, step: UpdateStep, found: Sequence[Tensor]) -> UpdateStep:
        """The update step with what the reference says of its pairs, which is cached if it is to be.

        Args:
            step: on all ranks.
            found: log-probabilities [2, p] of what :meth:`unknown` returns.

        Raises:
            ValueError: a log-probability is NaN or infinite; names the pair.
        """
        self._has_new |= self._cache is not None and bool(found)
        of_unknown = iter(found)
        step = replace(
            step,
            microbatches=tuple(
                self._with_log_probs(microbatch, of_unknown) if found else microbatch
                for microbatch in step.microbatches
            ),
        )
        # By what all ranks know alike: the step's place in the epoch, a stop that was asked for, rank 0's clock.
        if self._shared_seconds is None:
            self._shared_seconds = step.clock_seconds
        is_due = step.clock_seconds - self._shared_seconds >= _SHARE_SECONDS
        if is_due or step.is_last_of_epoch or step.stop_requested:
            self.share()
            self._shared_seconds = step.clock_seconds
        return step

    def share(self) -> None:
        """Tells all ranks what each has computed, and writes it to the disk. All ranks together.

        Before each checkpoint, too: a training that goes on from there then meets the same digits, which
        the other pairs of a microbatch have a part in.
        """
        if self._has_new and self._cache is not None:
            self._cache.share()
        self._has_new = False

    def _with_log_probs(self, microbatch: Microbatch, of_unknown: Iterator[Tensor]) -> Microbatch:
        unknown = _unknown_of(microbatch) if self._cache is not None else microbatch
        if unknown is None:
            return microbatch
        found = next(of_unknown)
        if self._cache is None and self._ranks.device.type != "cpu":
            # A look at the numbers would be a wait for them. The gradient is not finite then, either.
            return microbatch.with_teacher(found)
        found = found.cpu()
        pairs = unknown.targets.pairs
        assert pairs is not None
        for name, of_pair in zip(pairs.names, found.T, strict=True):
            if not of_pair.isfinite().all():
                raise ValueError(
                    f"{name}: the reference's log-probabilities of its answers are {of_pair.tolist()}; look at "
                    "ref_checkpointer's weights, or set dtype=fp32"
                )
        if self._cache is not None:
            self._cache.add(pairs.keys, found)
        if unknown is microbatch:
            return microbatch.with_teacher(found)
        targets = microbatch.targets
        assert targets.pairs is not None
        known = targets.teacher.masked_scatter(targets.teacher.isnan(), found)
        pairs = targets.pairs._replace(unknown=None)  # which need not go to the device
        return replace(microbatch, targets=targets._replace(teacher=known, pairs=pairs))


def _unknown_of(microbatch: Microbatch) -> Microbatch | None:
    """The pairs of a microbatch that the reference must compute: all, some or none."""
    if microbatch.targets.teacher is None:
        return microbatch
    pairs = microbatch.targets.pairs
    assert pairs is not None
    unknown: Microbatch | None = pairs.unknown
    return unknown
