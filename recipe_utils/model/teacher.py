"""The teacher of a distillation: a frozen model, or what is kept of what it said.

It says hidden states at the target positions, never logits; the student's loss projects both.

Shapes: n target tokens of a microbatch, d_t the teacher's width, m tokens that both vocabularies have.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtune import training
from torchtune.modules.tied_linear import TiedLinear
from torchtune.utils import get_logger
from tqdm import tqdm

from recipe_utils.checkpoint.load import TEACHER
from recipe_utils.data.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.microbatch import Microbatch
from recipe_utils.data.samples import Sample
from recipe_utils.data.teacher_cache import TeacherCache
from recipe_utils.data.text import ModelLimits, TextSamples
from recipe_utils.data.to_device import to_device_ahead
from recipe_utils.data.vocabulary import check_same_tokens
from recipe_utils.files import problems_with_folder
from recipe_utils.loss.chunks import chunks_of
from recipe_utils.loss.distillation import (
    LinearDistillationLoss,
    TeacherHidden,
    TeacherTopK,
    top_k_of,
)
from recipe_utils.loss.head import HiddenAtTargets, attach_head
from recipe_utils.model.adapters import find_adapters
from recipe_utils.model.build import ModelSettings, build_model, build_on_meta
from recipe_utils.model.document_mask import attend_within_documents
from recipe_utils.model.pipeline import Pipeline, build_pipeline
from recipe_utils.model.schedule import PipelineSettings
from recipe_utils.model.sizes import limits_of, num_outputs, warn_if_above_memory
from recipe_utils.model.stages import Stages
from recipe_utils.model.weights import check_weights, crc32_of_weights, load_weights
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings import ROOM, Count, naming

_log = get_logger("INFO")

_SECONDS_TO_LOSE = 60.0
"""How much of the pass before training a killed one may lose."""


@dataclass(frozen=True, config=ROOM)
class TeacherSettings:
    """How much is learned from a teacher, and where what it says comes from."""

    kd_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The divergence's part in the loss, the rest is cross-entropy's; 0 asks no teacher, 1 computes no
    cross-entropy."""
    teacher_dtype: Literal["fp32", "bf16", "fp64"] | None = None
    """Of the teacher's weights and hidden states; null is ``dtype``."""
    teacher_custom_sharded_layers: list[str] | None = None
    """As ``custom_sharded_layers``, of the teacher."""
    teacher_fsdp_cpu_offload: bool = False
    """As ``fsdp_cpu_offload``, of the teacher."""
    teacher_pipeline_parallel_split_points: list[Annotated[int, Field(ge=1)]] | None = None
    """The first layer of each of the teacher's stages but the first, one stage on each rank; null balances
    them by their parameters."""
    teacher_cache: Literal["hidden", "top_k"] | None = None
    """``hidden``: hidden states at all targets, computed in one pass before training and kept on the disk:
    exact; ``top_k``: the likeliest tokens, and all others as one: lossy; null asks at every update step."""
    teacher_cache_dir: str | None = None
    """Where it is kept, for any training with this teacher; null is ``output_dir``/teacher."""
    teacher_top_k: Count = 64
    """Tokens that ``teacher_cache: top_k`` keeps of each target."""
    teacher_top_k_at_any_temperature: bool = False
    """Insists on ``top_k`` above a temperature of 1, where it keeps a small part of the distribution."""

    def problems(self) -> Iterator[str]:
        """What is wrong between the keys, and whether the folder can be written to."""
        if self.teacher_cache_dir is None:
            return
        if self.teacher_cache is None:
            yield (
                f"teacher_cache_dir={self.teacher_cache_dir}: teacher_cache=null keeps nothing; set "
                "teacher_cache=hidden"
            )
        else:
            yield from problems_with_folder("teacher_cache_dir", self.teacher_cache_dir)

    def problems_with(self, keys: Mapping[str, Any]) -> Iterator[str]:
        """What a teacher lacks.

        Args:
            keys: ``teacher_model`` and ``teacher_checkpointer``.
        """
        for key, value in keys.items():
            if self.kd_ratio > 0 and value is None:
                yield f"{key}: it is missing; set it to a component (_component_: ...), or kd_ratio=0"


class NotKept(NamedTuple):
    """Stands for what the teacher says of a microbatch until it has been asked."""

    keys: tuple[bytes, ...]
    """Of the samples."""
    num_targets: tuple[int, ...]
    """Of each sample; they follow one another in the microbatch's."""


class Teacher:
    """Says of the targets of update steps what a frozen model makes of them.

    All ranks together. With pipeline stages the model is cut by its own costs, and all microbatches of an
    update step go forward through its stages before the student's schedule; what it says lies on the rank of
    the last stage, where the student's loss is.

    Args:
        settings: of the teacher. With ``kd_ratio=0`` nothing is made, read or said.
        ranks: of the job.
        output_dir: of the training.
    """

    def __init__(self, settings: TeacherSettings, ranks: Ranks, output_dir: str) -> None:
        self.is_asked = settings.kd_ratio > 0
        self._settings = settings
        self._ranks = ranks
        self._folder = Path(settings.teacher_cache_dir or Path(output_dir, "teacher"))
        self._group = ranks.new_cpu_group()
        self._has_last_stage = ranks.pp_rank == ranks.dims.pp - 1
        self._whole: Any = None  # on the meta device
        self._checkpointer: Any = None
        self._model: nn.Module | None = None
        self._pipeline: Pipeline | None = None
        self._build: Callable[[], None] | None = None  # where it may never be needed
        self._output: Any = None  # its output layer, where the rest of it is not kept
        self._cache: TeacherCache | None = None
        self._is_filling = False
        self._num_tokens = 0  # m
        self._stopwatch = _Stopwatch(ranks.device)

    # ---- What it is, before any weight is read ------------------------------------------------------

    def take_model(self, make_model: Callable[[], nn.Module], modules: ModelSettings) -> None:
        """Looks at its model.

        Args:
            make_model: its builder.
            modules: of the student; what saves memory of gradients does not apply.

        Raises:
            ValueError: it is no decoder, or has adapters.
        """
        if not self.is_asked:
            return
        settings = self._settings
        self._make_model = make_model
        self._modules = modules.without_gradients(
            dtype=settings.teacher_dtype or modules.dtype,
            custom_sharded_layers=settings.teacher_custom_sharded_layers,
            fsdp_cpu_offload=settings.teacher_fsdp_cpu_offload,
        )
        self._whole = build_on_meta(make_model, self._modules)
        if not hasattr(self._whole, "unembed"):
            raise ValueError(
                f"a {type(self._whole).__name__} has no hidden states to give; set it to a torchtune decoder"
            )
        if find_adapters(self._whole).modules:
            raise ValueError(
                "it has adapters, and a teacher is a model without them; set it to the plain builder, and "
                "teacher_checkpointer to an exported model that they are merged into"
            )

    def take_checkpointer(self, make_checkpointer: Callable[[], Any]) -> None:
        """Makes its checkpointer, which looks for its files."""
        if self.is_asked:
            self._checkpointer = make_checkpointer()

    def check_tokens(self, make_tokenizer: Callable[[], Any], tokenizer: Any) -> None:
        """Compares both tokenizers token by token; warns where it cannot.

        Args:
            make_tokenizer: returns the teacher's, None to look into its checkpoint's folder.
            tokenizer: the student's.

        Raises:
            ValueError: they differ; names the first token that does.
        """
        if not self.is_asked:
            return
        folder = getattr(self._checkpointer, "_checkpoint_dir", None)
        warning = check_same_tokens(tokenizer, make_tokenizer(), folder)
        if warning and self._ranks.is_zero:
            _log.warning(warning)

    def narrow(self, limits: ModelLimits) -> ModelLimits:
        """What samples and rows may be, so that the teacher takes them, too."""
        if not self.is_asked:
            return limits
        own = limits_of(self._whole, self._ranks.device, self._modules.compile)
        narrowed = limits._replace(
            vocab_size=min(limits.vocab_size, own.vocab_size),
            other_attention=limits.other_attention or own.other_attention,
        )
        if own.max_seq_len < limits.max_seq_len:
            narrowed = narrowed._replace(
                max_seq_len=own.max_seq_len, limits_length="the teacher_model's"
            )
        return narrowed

    @property
    def known(self) -> "Teacher | None":
        """Who is asked when a microbatch is made: this teacher, if what it says is kept."""
        return self if self.is_asked and self._settings.teacher_cache is not None else None

    # ---- The model, or what is kept of it ---------------------------------------------------------

    def set_up(
        self,
        student: nn.Module,
        loss_fn: LinearDistillationLoss,
        text: TextSamples,
    ) -> dict[str, str]:
        """Builds it with its weights; or, where what it says is kept, its output layer alone.

        Args:
            student: whole, on any device.
            loss_fn: that asks it.
            text: what it is asked about.

        Returns:
            What its weights are known by, so that a resumed training has the same teacher.

        Raises:
            recipe_utils.settings.ConfigError: its weights do not fit, or see :meth:`_check_top_k`.
        """
        if not self.is_asked:
            return {}
        settings, modules, device = self._settings, self._modules, self._ranks.device
        num_of_teacher, num_of_student = num_outputs(self._whole), num_outputs(student)
        self._num_tokens = min(num_of_teacher, num_of_student)
        if num_of_teacher != num_of_student and self._ranks.is_zero:
            _log.info(
                f"The teacher has {num_of_teacher} tokens, the student {num_of_student}: the divergence is "
                f"taken over the first {self._num_tokens}"
            )
        self._temperature = loss_fn.teacher_temperature
        self._check_top_k()

        def prepare(decoder: nn.Module, has_output: bool) -> None:
            attend_within_documents(decoder, device, text.longest_row)
            if has_output:
                attach_head(decoder, HiddenAtTargets())

        def build(checkpoint: dict[str, Any]) -> None:
            pipeline = PipelineSettings(
                pipeline_parallel_schedule="GPipe",  # no backward, so nothing to interleave
                pipeline_parallel_split_points=settings.teacher_pipeline_parallel_split_points,
            )
            with naming("teacher_model"):
                model = build_model(self._make_model, prepare, modules, self._ranks, pipeline)
            with naming("teacher_checkpointer"):
                load_weights(model, checkpoint, modules, device)
            self._model = model.requires_grad_(False).eval()
            self._pipeline = build_pipeline(model, pipeline, modules.torch_dtype, self._ranks)

        with naming("teacher_checkpointer"):
            checkpoint = self._checkpointer.load_checkpoint()
            weights = checkpoint[training.MODEL_KEY]
            crc32 = crc32_of_weights(weights, self._group)
            check_weights(self._whole, weights)
        if self._ranks.is_zero:
            warn_if_above_memory(
                student, self._whole, device, self._ranks.dp_degree * self._ranks.dims.pp
            )
        if settings.teacher_cache is None:
            build(checkpoint)
        else:
            self._build = lambda: build(self._checkpointer.load_checkpoint())
            self._cache = TeacherCache(self._folder, self._context(crc32), self._group)
            if self._ranks.is_zero:
                _log.info(f"{self._folder}: the teacher is known of {len(self._cache)} samples")
            if settings.teacher_cache == "hidden" and self._has_last_stage:
                self._output = _output_layer(self._whole, weights, modules.torch_dtype, device)
        return {TEACHER: crc32}

    def _check_top_k(self) -> None:
        """Raises ValueError: more tokens than there are, or a temperature that top_k does not go with."""
        settings = self._settings
        if settings.teacher_cache != "top_k":
            return
        if settings.teacher_top_k > self._num_tokens:
            raise ValueError(
                f"teacher_top_k={settings.teacher_top_k}: teacher and student have {self._num_tokens} tokens "
                "in common; set it to fewer"
            )
        if self._temperature > 1 and not settings.teacher_top_k_at_any_temperature:
            raise ValueError(
                f"teacher_cache=top_k: at kd_loss.temperature={self._temperature} the "
                f"{settings.teacher_top_k} likeliest tokens are a small part of the distribution; set "
                "teacher_cache=hidden, or teacher_top_k_at_any_temperature=True to do so anyway"
            )

    def _context(self, crc32: str) -> dict[str, Any]:
        """What its word depends on besides a sample."""
        context: dict[str, Any] = {
            "model": repr(self._whole),
            "weights": crc32,
            "dtype": str(self._modules.torch_dtype),
            "device": self._ranks.device.type,
            "kind": self._settings.teacher_cache,
        }
        if self._settings.teacher_cache == "top_k":
            context |= {
                "k": self._settings.teacher_top_k,
                "num_tokens": self._num_tokens,
                "temperature": self._temperature,
            }
        return context

    # ---- What it says ----------------------------------------------------------------------------

    @contextmanager
    def teaching(self, step: UpdateStep) -> Iterator[Sequence[Microbatch]]:
        """The microbatches of an update step with what the teacher says of their targets.

        Computed before any gradient exists. Until the end of the block its output weight is gathered, for
        the student's loss to project its hidden states.

        Raises:
            ValueError: the teacher says NaN or infinity; looked at on a CPU only, where nobody waits.
        """
        if not self.is_asked:
            yield step.microbatches
            return
        if self._cache is not None:
            yield [self._with_kept(microbatch) for microbatch in step.microbatches]
            return
        with self._stopwatch:
            hidden = self._hidden_of(step.microbatches)
        with self._output_layer() as output:
            yield [
                microbatch.with_teacher(TeacherHidden(hidden[i], output))
                if i in hidden
                else microbatch
                for i, microbatch in enumerate(step.microbatches)
            ]

    def read_seconds(self) -> float | None:
        """Mean seconds per update step that the teacher took since the last time, on this rank."""
        return self._stopwatch.read_and_restart() if self.is_asked and not self._cache else None

    @torch.no_grad()
    def _hidden_of(self, microbatches: Sequence[Microbatch]) -> dict[int, Tensor]:
        """Hidden states [n, d_t] by the microbatch's index; empty on ranks without the last stage."""
        assert self._model is not None
        if self._pipeline is not None:
            # PyTorch's schedules reshard FSDP's stages at their end.
            hidden = self._pipeline.outputs(microbatches)
        else:
            on_device = to_device_ahead(microbatches, self._ranks.device)
            hidden = {
                i: self._model(**microbatch.inputs, targets=microbatch.targets)
                for i, microbatch in enumerate(on_device)
            }
        if self._ranks.device.type == "cpu":
            _check_finite(hidden.values())
        return hidden

    @contextmanager
    def _output_layer(self) -> Iterator[Any]:
        """Its output layer with a weight that can be read; None on ranks without the last stage."""
        if not self._has_last_stage:
            yield None
            return
        decoder: Any = self._model
        if isinstance(decoder, Stages):
            decoder = decoder.by_index()[decoder.whole.num_stages - 1]
        holders = [each for each in (decoder, decoder.output) if isinstance(each, FSDPModule)]
        for holder in holders:
            holder.unshard()
            # As a unit of its own the output layer would let go of its weight after every chunk.
            holder.set_reshard_after_forward(False, recurse=False)
        try:
            yield decoder.output
        finally:
            for holder in holders:
                holder.reshard()

    # ---- What is kept ------------------------------------------------------------------------------

    def find(self, samples: Sequence[Sample], num_targets: Sequence[int]) -> Any:
        """What is kept of a microbatch's samples; asked by the thread that makes microbatches.

        Args:
            samples: of text.
            num_targets: of each.

        Returns:
            Tensors by name, on the CPU; :class:`NotKept` while the pass before training goes on. None on
            ranks without the last stage.

        Raises:
            recipe_utils.files.CheckpointError: a file is damaged, or a sample is not the one that it was.
        """
        assert self._cache is not None
        keys = [self._cache.key_of(sample) for sample in samples]
        if self._is_filling:
            if self._cache.knows(keys):
                return None
            return NotKept(tuple(keys), tuple(num_targets))
        return self._cache.find(keys) if self._has_last_stage else None

    def fill(self, num_epochs: int, *loaders: UpdateStepLoader | None) -> None:
        """Asks once for all samples that will be trained or validated on, where what is said is kept.

        Args:
            num_epochs: of the training.
            loaders: of its data.
        """
        if self._cache is None:
            return
        self._is_filling = True
        self._written_seconds = time.monotonic()
        for loader in filter(None, loaders):
            num_steps, steps = loader.one_pass(num_epochs)
            with steps:
                for step in tqdm(steps, "teacher", num_steps, disable=not self._ranks.is_zero):
                    self._remember(step)
        self._cache.write()
        self._cache.reload()
        self._is_filling = False
        self._model = self._pipeline = self._build = None

    def _remember(self, step: UpdateStep) -> None:
        not_kept = [
            microbatch
            for microbatch in step.microbatches
            if isinstance(microbatch.targets.teacher, NotKept)
        ]
        # Every rank must run the same forwards; what a rank runs besides is dropped.
        most = max(gather_objects(len(not_kept), self._group))
        if most == 0:
            return
        if self._model is None:
            assert self._build is not None
            self._build()
        asked = not_kept + [step.microbatches[0]] * (most - len(not_kept))
        hidden = self._hidden_of([microbatch.with_teacher(None) for microbatch in asked])
        with self._output_layer() as output:
            for index in range(len(not_kept) if hidden else 0):
                self._keep(not_kept[index].targets.teacher, hidden[index], output)

    @torch.no_grad()
    def _keep(self, samples: NotKept, hidden: Tensor, output: Any) -> None:
        assert self._cache is not None
        values = {"hidden": hidden}
        if self._settings.teacher_cache == "top_k":
            parts = [
                top_k_of(
                    TeacherHidden(hidden[rows], output),
                    self._settings.teacher_top_k,
                    self._num_tokens,
                    self._temperature,
                )
                for rows in chunks_of(max(len(hidden), 1), 256)
            ]
            values = {
                name: torch.cat([getattr(part, name) for part in parts])
                for name in ("token_ids", "log_probs")
            }
        start = 0
        for key, num_targets in zip(samples.keys, samples.num_targets, strict=True):
            of_sample = slice(start, start + num_targets)
            self._cache.add(key, {name: value[of_sample] for name, value in values.items()})
            start += num_targets
        if time.monotonic() - self._written_seconds > _SECONDS_TO_LOSE:
            self._cache.write()
            self._written_seconds = time.monotonic()

    def _with_kept(self, microbatch: Microbatch) -> Microbatch:
        if not self._has_last_stage:
            return microbatch
        assert self._cache is not None
        kept = microbatch.targets.teacher
        if kept is None:  # a stand-in
            kept = self._cache.find([])
        if self._settings.teacher_cache == "hidden":
            return microbatch.with_teacher(TeacherHidden(kept["hidden"], self._output))
        return microbatch.with_teacher(TeacherTopK(**kept, num_tokens=self._num_tokens))


class _Stopwatch:
    """Seconds of blocks, without waiting for the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._start: Any = None

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: Any) -> None:
        self._spans.append((self._start, self._now()))

    def _now(self) -> Any:
        if self._is_cuda:
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()

    def read_and_restart(self) -> float:
        """Mean seconds of a block since the last time."""
        if self._is_cuda and self._spans:
            self._spans[-1][1].synchronize()
        seconds = [
            start.elapsed_time(end) / 1000 if self._is_cuda else end - start
            for start, end in self._spans
        ]
        self._spans.clear()
        return sum(seconds) / max(len(seconds), 1)


def _check_finite(tensors: Any) -> None:
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise ValueError(
            "teacher_checkpointer: the teacher's hidden states are NaN or infinite; look at its weights, or "
            "set teacher_dtype=fp32"
        )


def _output_layer(
    whole: Any, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Any:
    """The output layer alone of a decoder on the meta device, with its weights, whole on every rank."""
    output = whole.output
    holder = output.tied_module if isinstance(output, TiedLinear) else output
    (prefix,) = [name for name, module in whole.named_modules() if module is holder]
    own = {name: weights[f"{prefix}.{name}"].to(device, dtype) for name in holder.state_dict()}
    holder.load_state_dict(own, assign=True)
    holder.requires_grad_(False)
    return output
