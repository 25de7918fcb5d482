"""Frozen teacher for distillation: hidden states at target positions, which the loss projects in chunks.

Example: at 8,192 target tokens, a teacher of width 2,048 with 128,256 tokens has hidden states of 34 MB in bf16. Its
logits, of 2.1 GB, never exist at once: the loss projects 256 target tokens at a time.
"""

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from omegaconf import DictConfig
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn

from recipe_utils.checkpoint.load import TEACHER
from recipe_utils.losses.attach import HiddenAtTargets
from recipe_utils.losses.divergences import TeacherHidden
from recipe_utils.model_kinds import text_decoder
from recipe_utils.models.adapters.lora import find_adapters
from recipe_utils.models.attention.exchange import RowGroups
from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.frozen import Attached, frozen_copy, nothing_attached
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.sizes import num_outputs, warn_if_above_memory
from recipe_utils.models.vocabulary import check_same_tokens
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.keys import STRICT, OnlyWith, own_keys
from recipe_utils.settings.problems import ConfigError, Problem, build, naming
from recipe_utils.torchtune_names import instantiate, log_rank_zero
from recipe_utils.update_steps.step import Microbatch, UpdateStep


@dataclass(frozen=True, config=STRICT)
class TeacherSettings:
    """Weight of the divergence, and the teacher's model."""

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
    """``pipeline_parallel_split_points`` of the teacher."""

    unused: ClassVar = dict.fromkeys(("tensor_parallel_dim", "optimizer_in_bwd"), "not with a teacher")

    def problems_of_teacher(self, components: Mapping[str, Any]) -> Iterator[Problem]:
        """Yields missing ``components`` of a teacher, by key."""
        for key, component in components.items():
            if self.kd_ratio > 0 and component is None:
                yield Problem(key, "it is missing; set it to a component (_component_: ...), or kd_ratio=0")


class TeacherOnMeta(NamedTuple):
    """Teacher of which no weight was read; nothing with ``kd_ratio=0``."""

    model: Any = None
    checkpointer: Any = None
    modules: ModelSettings | None = None
    split_points: list[int] | None = None


@contextmanager
def naming_teacher() -> Iterator[None]:
    """Names the teacher's keys in errors of functions that name the student's, such as ``teacher_dtype`` for ``dtype``."""
    try:
        with naming("teacher_model"):
            yield
    except ConfigError as error:
        keys = [key.removeprefix("teacher_") for key in own_keys(TeacherSettings)]
        names = re.compile(rf"\b(({'|'.join(keys)})(?=[=:])|(model|checkpointer)(?=\.\w))")
        texts = [names.sub(r"teacher_\1", str(problem)) for problem in error.problems]
        of_key = re.compile(r"teacher_model: (?=teacher_\w+[=.:])")
        raise ConfigError(*(of_key.sub("", text, count=1) for text in texts)) from error


def build_teacher_on_meta(
    cfg: DictConfig, settings: TeacherSettings, modules: ModelSettings, student: nn.Module, checkpointer: Any
) -> TeacherOnMeta:
    """Builds the teacher's meta model and checkpointer, which the recipe's ``cfg`` configures.

    ``modules``, ``student``, a meta model, and ``checkpointer`` are the student's. Raises ConfigError if the teacher
    does not fit the student.
    """
    if settings.kd_ratio == 0:
        return TeacherOnMeta()
    # Memory savings for gradients do not apply.
    modules = modules.without_gradients(
        dtype=settings.teacher_dtype or modules.dtype,
        custom_sharded_layers=settings.teacher_custom_sharded_layers,
        fsdp_cpu_offload=settings.teacher_fsdp_cpu_offload,
        quantizer=None,
    )
    with naming_teacher():
        model = build_on_meta(partial(instantiate, cfg.get("teacher_model")), modules)
        if not hasattr(text_decoder(model), "unembed"):
            raise ValueError(f"a {type(model).__name__} returns no hidden states; set it to a torchtune decoder")
        if find_adapters(model).modules:
            raise ValueError(
                "it has adapters, and a teacher is a model without them; set it to the plain builder, and "
                "teacher_checkpointer to an exported model that they are merged into"
            )
        if hasattr(student, "decoder") != hasattr(model, "decoder"):
            kinds = [type(each).__name__ for each in (model, student)]
            raise ValueError(
                f"a {kinds[0]} does not take the inputs of a {kinds[1]}; set it to one that does, with or without images"
            )
    own_checkpointer = build(TEACHER, instantiate, cfg.get(TEACHER))
    sizes = num_outputs(model), num_outputs(student)
    is_same = build(TEACHER, check_same_tokens, checkpointer, own_checkpointer, ("student", "teacher"))
    if sizes[0] != sizes[1]:
        text = f"The teacher has {sizes[0]} tokens, the student {sizes[1]}: the divergence is computed over the first "
        text += str(min(sizes))
        text += "" if is_same else "; not compared, since not both have a tokenizer.json beside their weights"
        log_rank_zero(text, logging.INFO if is_same else logging.WARNING)
    return TeacherOnMeta(model, own_checkpointer, modules, settings.teacher_pipeline_parallel_split_points)


class Teacher:
    """Attaches a frozen model's hidden states to the targets of update steps. All ranks together.

    With pipeline stages, they are on the rank of the last one, where the loss is computed. ``student`` is the whole
    model. Raises ConfigError if weights do not fit, or the model cannot be built.
    """

    def __init__(
        self, on_meta: TeacherOnMeta, ranks: Ranks, student: nn.Module, longest_row: int, row_groups: RowGroups
    ) -> None:
        self._spans: list[tuple[Any, Any]] = []  # start and stop of the model's forwards
        self._is_cuda = ranks.device.type == "cuda"
        self.attached: Attached = nothing_attached
        self.fingerprints: Mapping[str, str] = {}
        """Those of its weights, so that a resumed training has the same teacher."""
        if on_meta.modules is None:
            return
        text = "the teacher's hidden states are NaN or infinite; look at its weights, or set teacher_dtype=fp32"
        self._model = naming_teacher()(frozen_copy)(
            *("teacher", on_meta.model, HiddenAtTargets(), on_meta.checkpointer, on_meta.modules),
            *(ranks, longest_row, row_groups),
            split_points=on_meta.split_points,
            keys=("teacher_model", TEACHER),
            explain=lambda *_: f"{TEACHER}: {text}",
        )
        if ranks.is_zero:
            warn_if_above_memory(student, on_meta.model, ranks)
        self._model.during_forward = self._timed
        self.attached, self.fingerprints = self._with_output_layer, self._model.fingerprints

    @contextmanager
    def _with_output_layer(self, step: UpdateStep) -> Iterator[Sequence[Microbatch]]:
        # The loss projects hidden states, so the output layer stays gathered in the update step.
        with self._model.attached(step) as microbatches, self._model.output_layer() as layer:
            yield [
                m.with_outputs(teacher=TeacherHidden(m.targets.outputs["teacher"], layer)) if layer is not None else m
                for m in microbatches
            ]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def read_seconds(self) -> float | None:
        """Returns mean seconds of the model's forwards per update step since the last call.

        None if none ran. Only forwards that the device has finished count, without synchronization.
        """
        done = [(start, stop) for start, stop in self._spans if not self._is_cuda or stop.query()]
        self._spans = self._spans[len(done) :]
        seconds = [a.elapsed_time(b) / 1000 if self._is_cuda else b - a for a, b in done]
        return sum(seconds) / len(seconds) if seconds else None

    def _now(self) -> Any:
        if self._is_cuda:
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()
