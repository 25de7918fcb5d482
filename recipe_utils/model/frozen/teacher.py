"""The teacher of a distillation: what it may be, and what it says of update steps.

It says hidden states at the target positions, never logits; the student's loss projects both.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from torchtune import training
from torchtune.utils import get_logger

from recipe_utils.checkpoint.load import TEACHER
from recipe_utils.data.loader.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.samples import Sample
from recipe_utils.data.text.collator import TextCollator
from recipe_utils.data.text.limits import ModelLimits
from recipe_utils.loss.distillation import LinearDistillationLoss, TeacherHidden
from recipe_utils.model.adapters.adapters import find_adapters
from recipe_utils.model.build.build import ModelSettings, build_on_meta
from recipe_utils.model.build.sizes import limits_of, num_outputs, warn_if_above_memory
from recipe_utils.model.build.weights import check_weights, crc32_of_weights
from recipe_utils.model.frozen.cache import TeacherCache
from recipe_utils.model.frozen.hidden_states import FrozenModel, output_layer_alone
from recipe_utils.model.frozen.kept_teacher import KeptTeacher, TopK
from recipe_utils.model.frozen.vocabulary import check_same_tokens
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.keys import STRICT, Count, FilePath, OnlyWith
from recipe_utils.settings.problems import Problem, naming, problems_with_folder

_log = get_logger("INFO")


@dataclass(frozen=True, config=STRICT)
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
    teacher_cache_dir: FilePath | None = None
    """Where it is kept, for any training with this teacher; null is ``output_dir``/teacher."""
    teacher_top_k: Annotated[Count, OnlyWith("teacher_cache", ("top_k",))] = 64
    """Tokens that ``teacher_cache: top_k`` keeps of each target."""
    teacher_top_k_at_any_temperature: Annotated[bool, OnlyWith("teacher_cache", ("top_k",))] = False
    """Insists on ``top_k`` above a temperature of 1, where it keeps a small part of the distribution."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong between the keys, and whether the folder can be written to."""
        if self.teacher_cache_dir is None:
            return
        if self.teacher_cache is None:
            yield Problem(
                "teacher_cache_dir",
                "teacher_cache=null keeps nothing; set teacher_cache=hidden",
                self.teacher_cache_dir,
                depends_on=("teacher_cache",),
            )
        else:
            yield from problems_with_folder("teacher_cache_dir", self.teacher_cache_dir)

    def problems_with(self, keys: Mapping[str, Any]) -> Iterator[Problem]:
        """What a teacher lacks.

        Args:
            keys: ``teacher_model`` and ``teacher_checkpointer``.
        """
        for key, value in keys.items():
            if self.kd_ratio > 0 and value is None:
                yield Problem(
                    key,
                    "it is missing; set it to a component (_component_: ...), or kd_ratio=0",
                    depends_on=("kd_ratio",),
                )


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

    def __init__(self, settings: TeacherSettings, ranks: Ranks, output_dir: Path) -> None:
        self.is_asked = settings.kd_ratio > 0
        self._settings = settings
        self._ranks = ranks
        self._folder = Path(settings.teacher_cache_dir or Path(output_dir, "teacher"))
        self._group = ranks.new_cpu_group()
        self._whole: Any = None  # on the meta device
        self._checkpointer: Any = None
        self._live: FrozenModel | None = None
        self._kept: KeptTeacher | None = None
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
        if not hasattr(getattr(self._whole, "decoder", self._whole), "unembed"):
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
            # In another precision it may attend in another way.
            num_row_lengths=min(
                filter(None, (limits.num_row_lengths, own.num_row_lengths)), default=None
            ),
            packing_problem=limits.packing_problem or own.packing_problem,
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
        text: TextCollator,
        depends_on: Any,
    ) -> dict[str, str]:
        """Builds it with its weights; or, where what it says is kept, its output layer alone.

        Args:
            student: whole, on any device.
            loss_fn: that asks it.
            text: what it is asked about.
            depends_on: what its word depends on besides weights, precision and samples, as plain values.

        Returns:
            What its weights are known by, so that a resumed training has the same teacher.

        Raises:
            recipe_utils.settings.problems.ConfigError: its weights do not fit, or it cannot be built or kept so.
        """
        if not self.is_asked:
            return {}
        modules = self._modules
        with naming():
            self._check_inputs(student)
            top_k = self._top_k(num_outputs(student), loss_fn.teacher_temperature)
        with naming("teacher_checkpointer"):
            checkpoint = self._checkpointer.load_checkpoint()
            weights = checkpoint[training.MODEL_KEY]
            crc32 = crc32_of_weights(weights, self._group)
            check_weights(self._whole, weights)
            output = None
            if self._settings.teacher_cache == "hidden" and self._ranks.has_last_stage:
                output = output_layer_alone(
                    self._whole, weights, modules.torch_dtype, self._ranks.device
                )
            del weights  # or they would be there twice while the model is built

        def build(checkpoint: dict[str, Any]) -> FrozenModel:
            split_points = self._settings.teacher_pipeline_parallel_split_points
            return FrozenModel(
                self._make_model, checkpoint, modules, split_points, text.longest_row, self._ranks
            )

        if self._settings.teacher_cache is None:
            if self._ranks.is_zero:
                warn_if_above_memory(student, self._whole, self._ranks)
            self._live = build(checkpoint)
            return {TEACHER: crc32}
        context = {
            "model": depends_on,
            "weights": crc32,
            "dtype": str(modules.torch_dtype),
            "device": self._ranks.device.type,
            "top_k": top_k,
        }
        cache = TeacherCache(self._folder, context, self._group)
        if self._ranks.is_zero:
            _log.info(f"{self._folder}: the teacher is known of {len(cache)} samples")
        self._kept = KeptTeacher(
            cache, lambda: build(self._checkpointer.load_checkpoint()), output, top_k, self._ranks
        )
        return {TEACHER: crc32}

    def _check_inputs(self, student: nn.Module) -> None:
        """Raises ValueError: a student of images and a teacher of text alone, or the other way round."""
        if hasattr(student, "decoder") != hasattr(self._whole, "decoder"):
            kinds = [type(model).__name__ for model in (self._whole, student)]
            raise ValueError(
                f"teacher_model: a {kinds[0]} does not take what a {kinds[1]} takes; set it to one that does"
            )

    def _top_k(self, num_of_student: int, temperature: float) -> TopK | None:
        """What of a distribution is kept, if hidden states are not.

        Raises:
            ValueError: more tokens than there are, or at a temperature that it does not go with.
        """
        settings, num_of_teacher = self._settings, num_outputs(self._whole)
        num_tokens = min(num_of_teacher, num_of_student)
        if num_of_teacher != num_of_student and self._ranks.is_zero:
            _log.info(
                f"The teacher gives {num_of_teacher} tokens a probability, the student {num_of_student}: the "
                f"divergence is taken over the first {num_tokens}"
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
                "likeliest tokens are a small part of the distribution; set teacher_cache=hidden, or "
                "teacher_top_k_at_any_temperature=True to do so anyway"
            )
        return TopK(settings.teacher_top_k, num_tokens, temperature)

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
        if self._kept is not None:
            yield [self._kept.say(microbatch) for microbatch in step.microbatches]
            return
        assert self._live is not None
        with self._stopwatch:
            hidden = self._live.hidden_of(step.microbatches)
        with self._live.output_layer() as output:
            yield [
                microbatch.with_teacher(TeacherHidden(hidden[i], output)) if hidden else microbatch
                for i, microbatch in enumerate(step.microbatches)
            ]

    def read_seconds(self) -> float | None:
        """Mean seconds per update step since the last time, on this rank; None if it is not asked then."""
        return self._stopwatch.read_and_restart() if self._live is not None else None

    def find(self, samples: Sequence[Sample], num_targets: Sequence[int]) -> Any:
        """See :meth:`recipe_utils.model.frozen.kept_teacher.KeptTeacher.find`; None before anything is kept."""
        return self._kept.find(samples, num_targets) if self._kept is not None else None

    def fill(self, num_epochs: int, *loaders: UpdateStepLoader | None) -> None:
        """See :meth:`recipe_utils.model.frozen.kept_teacher.KeptTeacher.fill`; nothing where nothing is kept."""
        if self._kept is not None:
            self._kept.fill(num_epochs, [loader for loader in loaders if loader is not None])


class _Stopwatch:
    """Seconds of blocks, without waiting for the device."""

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

    def read_and_restart(self) -> float | None:
        """Mean seconds of the blocks that the device has finished since the last call; None without any."""
        done = [(a, b) for a, b in self._spans if not self._is_cuda or b.query()]
        self._spans = self._spans[len(done) :]
        seconds = [a.elapsed_time(b) / 1000 if self._is_cuda else b - a for a, b in done]
        return sum(seconds) / len(seconds) if seconds else None
