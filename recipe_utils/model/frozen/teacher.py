"""Frozen teacher for distillation: hidden states at target positions, which the loss projects in chunks.

Shapes: n target tokens of a microbatch, d_t the teacher's width, k most probable tokens.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torchtune import config, training
from torchtune.utils import get_logger

from recipe_utils.checkpoint.load import TEACHER
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.samples import Sample
from recipe_utils.long_rows.exchange import RowGroups
from recipe_utils.loss.attach_loss import HiddenAtTargets, attach_loss
from recipe_utils.loss.chunks import chunks_of
from recipe_utils.loss.distillation import (
    LinearDistillationLoss,
    TeacherHidden,
    TeacherTopK,
    top_k_of,
)
from recipe_utils.model.adapters.adapters import find_adapters
from recipe_utils.model.attention.document_mask import attend_within_documents
from recipe_utils.model.construct.build import ModelSettings, build_on_meta
from recipe_utils.model.construct.sizes import num_outputs, warn_if_above_memory
from recipe_utils.model.frozen.cache import Values
from recipe_utils.model.frozen.model import (
    FrozenModel,
    build_frozen_model,
    context_of,
    output_layer_alone,
)
from recipe_utils.model.frozen.outputs import FrozenOutputs
from recipe_utils.model.frozen.vocabulary import check_same_tokens
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.keys import STRICT, Count, FilePath, OnlyWith
from recipe_utils.settings.problems import Problem, build, problems_with_folder

_log = get_logger("INFO")

_TOKENS_PER_CHUNK = 256
"""Targets per chunk of logits in which the most probable tokens are found."""
_TEXT = ("tokens", "labels", "seq_lens", "input_pos")


@dataclass(frozen=True, config=STRICT)
class TeacherSettings:
    """Weight of the divergence, and the teacher's model and cache."""

    kd_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight of the divergence in the loss; cross-entropy's is 1 - kd_ratio. 0 loads no teacher."""
    teacher_dtype: Literal["fp32", "bf16", "fp64"] | None = None
    """Precision of the teacher's weights and hidden states; null is ``dtype``."""
    teacher_custom_sharded_layers: list[str] | None = None
    """``custom_sharded_layers`` of the teacher."""
    teacher_fsdp_cpu_offload: bool = False
    """``fsdp_cpu_offload`` of the teacher."""
    teacher_pipeline_parallel_split_points: Annotated[
        list[Annotated[int, Field(ge=1)]] | None, OnlyWith("pipeline_parallel_dim", above=1)
    ] = None
    """First layer of each of the teacher's stages but the first; null balances them by their
    parameters."""
    teacher_cache: Annotated[Literal["hidden", "top_k"] | None, OnlyWith("kd_ratio")] = None
    """Teacher outputs computed once before training and stored on disk: ``hidden`` states at
    all targets (exact), or ``top_k`` tokens and the sum of all others (lossy). null: computed
    at every update step."""
    teacher_cache_dir: Annotated[
        FilePath | None, OnlyWith("teacher_cache", ("hidden", "top_k"))
    ] = None
    """Folder of the cache, shared by all trainings with this teacher; null is
    ``output_dir``/teacher."""
    teacher_top_k: Annotated[Count, OnlyWith("teacher_cache", ("top_k",))] = 64
    """Tokens per target that ``teacher_cache: top_k`` stores."""
    teacher_top_k_at_any_temperature: Annotated[bool, OnlyWith("teacher_cache", ("top_k",))] = False
    """Allows ``top_k`` above a temperature of 1, where it covers little of the distribution."""

    def problems(self) -> Iterator[Problem]:
        """Yields problems with the folder, the teacher's components and other keys of the recipe."""
        if self.teacher_cache is not None and self.teacher_cache_dir is not None:
            yield from problems_with_folder("teacher_cache_dir", self.teacher_cache_dir)
        settings: Any = self  # the recipe's
        if (dim := settings.tensor_parallel_dim) > 1:
            yield Problem("tensor_parallel_dim", "not with a teacher; set it to 1", dim)
        if self.teacher_cache is not None and settings.max_ranks_per_row > 1:
            text = f"teacher_cache={self.teacher_cache} stores outputs of whole rows; leave teacher_cache out"
            yield Problem("max_ranks_per_row", text, settings.max_ranks_per_row)
        if settings.optimizer_in_bwd:
            yield Problem("optimizer_in_bwd", "not with a teacher; set it to False", True)
        for key in ("teacher_model", "teacher_checkpointer"):
            if self.kd_ratio > 0 and getattr(settings, key) is None:
                text = "it is missing; set it to a component (_component_: ...), or kd_ratio=0"
                yield Problem(key, text)


class _TopK(NamedTuple):
    """Arguments of :func:`top_k_of`."""

    k: int
    num_tokens: int
    temperature: float


class Teacher(FrozenOutputs):
    """Attaches a frozen model's outputs to the targets of update steps. All ranks together.

    With pipeline stages, outputs are on the rank of the last one, where the loss is computed.
    ``settings`` are the recipe's. With ``kd_ratio=0`` nothing is built or read.
    """

    name = "teacher"
    checkpointer_key = TEACHER
    cache_key = "teacher_cache_dir"
    needs_output_layer = True

    def __init__(self, settings: Any, ranks: Ranks) -> None:
        own: TeacherSettings = settings
        folder = own.teacher_cache_dir or Path(settings.output_dir, "teacher")
        super().__init__(ranks, own.kd_ratio > 0, Path(folder) if own.teacher_cache else None)
        self._settings = own
        self._student_modules: ModelSettings = settings
        self.whole: Any = None
        """The whole model on the meta device; None if it is not used."""
        self._checkpointer: Any = None
        self._top_k: _TopK | None = None

    # ---- Checks, before any weight is read ----------------------------------------------------------

    def build_parts(self, cfg: Mapping[str, Any], tokenizer: Any) -> None:
        """Builds meta model and checkpointer of the recipe's ``cfg``, and compares tokenizers."""
        if self.is_used:
            build("teacher_model", self._take_model, cfg.get("teacher_model"))
            checkpointer = cfg.get("teacher_checkpointer")
            self._checkpointer = build("teacher_checkpointer", config.instantiate, checkpointer)
            build("teacher_tokenizer", self._check_tokens, cfg.get("teacher_tokenizer"), tokenizer)

    def _take_model(self, component: Any) -> None:
        settings, modules = self._settings, self._student_modules
        self._make_model = partial(config.instantiate, component)
        # Memory savings for gradients do not apply.
        self._modules = modules.without_gradients(
            dtype=settings.teacher_dtype or modules.dtype,
            custom_sharded_layers=settings.teacher_custom_sharded_layers,
            fsdp_cpu_offload=settings.teacher_fsdp_cpu_offload,
            quantizer=None,
        )
        self.whole = build_on_meta(self._make_model, self._modules)
        if not hasattr(getattr(self.whole, "decoder", self.whole), "unembed"):
            raise ValueError(
                f"a {type(self.whole).__name__} returns no hidden states; set it to a torchtune decoder"
            )
        if find_adapters(self.whole).modules:
            raise ValueError(
                "it has adapters, and a teacher is a model without them; set it to the plain builder, and "
                "teacher_checkpointer to an exported model that they are merged into"
            )

    def _check_tokens(self, component: Any, tokenizer: Any) -> None:
        folder = getattr(self._checkpointer, "_checkpoint_dir", None)
        warning = check_same_tokens(tokenizer, config.instantiate(component), folder)
        if warning and self.ranks.is_zero:
            _log.warning(warning)

    def check_student(self, student: nn.Module, loss_fn: LinearDistillationLoss) -> None:
        """Raises ValueError if the teacher does not take the whole ``student``'s inputs, or cannot be cached."""
        if hasattr(student, "decoder") != hasattr(self.whole, "decoder"):
            kinds = [type(model).__name__ for model in (self.whole, student)]
            raise ValueError(
                f"teacher_model: a {kinds[0]} does not take the inputs of a {kinds[1]}; set it to one that "
                "does, with or without images"
            )
        self._top_k = self._resolve_top_k(num_outputs(student), loss_fn.teacher_temperature)

    # ---- The model, or its cache -------------------------------------------------------------------

    def set_up(
        self, student: nn.Module, longest_row: int, row_groups: RowGroups, context: Any
    ) -> dict[str, str]:
        """Builds the model with its weights; with a cache, only if outputs are missing.

        ``student`` is the whole model; ``context`` are plain values that outputs depend on besides
        weights, precision and samples. Returns fingerprints, so that a resumed training has the
        same teacher. Raises ConfigError if weights do not fit, or the model cannot be built.
        """
        if not self.is_used:
            return {}
        modules, settings, device = self._modules, self._settings, self.ranks.device
        checkpoint, fingerprints = self.load(self._checkpointer, self.whole)
        output = None
        if settings.teacher_cache == "hidden" and self.ranks.has_last_stage:
            weights = checkpoint[training.MODEL_KEY]
            output = output_layer_alone(self.whole, weights, modules.torch_dtype, device)
            del weights  # a reference would keep them in memory while the model is built
        if self.is_cached:
            checkpoint = {}
        elif self.ranks.is_zero:
            warn_if_above_memory(student, self.whole, self.ranks)

        def prepare(decoder: nn.Module, has_output: bool) -> None:
            attend_within_documents(decoder, device, longest_row, row_groups)
            if has_output:
                attach_loss(decoder, HiddenAtTargets())

        def build() -> FrozenModel:
            return build_frozen_model(
                self._make_model,
                prepare,
                checkpoint or self._checkpointer.load_checkpoint(),
                modules,
                self.ranks,
                split_points=settings.teacher_pipeline_parallel_split_points,
                keys=("teacher_model", TEACHER),
            )

        context = {
            "model": context,
            "weights": fingerprints[TEACHER],
            "dtype": str(modules.torch_dtype),
            "top_k": self._top_k,
            **context_of(self.whole),
        }
        self.open(build, context, output)
        return fingerprints

    def _resolve_top_k(self, num_of_student: int, temperature: float) -> _TopK | None:
        """Returns the part of a distribution to store; None unless ``teacher_cache`` is ``top_k``."""
        settings, num_of_teacher = self._settings, num_outputs(self.whole)
        num_tokens = min(num_of_teacher, num_of_student)
        if num_of_teacher != num_of_student and self.ranks.is_zero:
            _log.info(
                f"The teacher has {num_of_teacher} tokens, the student {num_of_student}: the divergence is "
                f"computed over the first {num_tokens}"
            )
        if settings.teacher_cache != "top_k":
            return None
        if settings.teacher_top_k > num_tokens:
            raise ValueError(
                f"teacher_top_k={settings.teacher_top_k}: teacher and student have {num_tokens} tokens in "
                "common; set it to fewer"
            )
        if temperature > 1 and not settings.teacher_top_k_at_any_temperature:
            raise ValueError(
                f"teacher_cache=top_k: at kd_loss.temperature={temperature} the {settings.teacher_top_k} "
                "most probable tokens are a small part of the distribution; set teacher_cache=hidden, or "
                "teacher_top_k_at_any_temperature=True to store them anyway"
            )
        return _TopK(settings.teacher_top_k, num_tokens, temperature)

    # ---- Outputs -----------------------------------------------------------------------------------

    def numbers_of(self, sample: Sample) -> Mapping[str, Any]:
        """Returns the parts of a sample that hidden states depend on; ValueError for more than text."""
        other = sorted(sample.keys() - {*_TEXT, "mask", "dataset_index", "step_position"})
        if other:
            raise ValueError(
                f"teacher_cache: it stores text only, a sample also has {', '.join(other)}; set teacher_cache=null"
            )
        return {name: sample[name] for name in _TEXT if name in sample}

    @torch.no_grad()
    def to_values(self, output: Tensor, layer: Any, microbatch: Microbatch) -> Values:
        """Returns hidden states [n, d_t], or the most probable tokens.

        Raises NonfiniteError for NaN or infinite ones on a CPU, where this needs no synchronization.
        """
        on_cpu = self.ranks.device.type == "cpu"
        if self.checks_outputs and on_cpu and not output.isfinite().all():
            raise NonfiniteError(
                "teacher_checkpointer: the teacher's hidden states are NaN or infinite; look at its weights, "
                "or set teacher_dtype=fp32"
            )
        if self._top_k is None:
            return {"hidden": output}
        parts = [
            top_k_of(TeacherHidden(output[rows], layer), *self._top_k)
            for rows in chunks_of(max(len(output), 1), _TOKENS_PER_CHUNK)
        ]
        return {
            "token_ids": torch.cat([part.token_ids for part in parts]),
            "log_probs": torch.cat([part.log_probs for part in parts]),
        }

    def attach(self, values: Values, layer: Any) -> TeacherHidden | TeacherTopK:
        """Returns hidden states with the layer that projects them, or the most probable tokens."""
        if self._top_k is None:
            return TeacherHidden(values["hidden"], layer)
        return TeacherTopK(**values, num_tokens=self._top_k.num_tokens)
