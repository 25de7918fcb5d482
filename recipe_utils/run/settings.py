"""Keys of a run: length, log, checkpoints, exports."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from recipe_utils.parallel.ranks import RankSettings
from recipe_utils.settings.components import Component, MadeWith
from recipe_utils.settings.keys import STRICT, Count, FilePath, OnlyWith, Positive
from recipe_utils.settings.problems import Problem, problems_with_folder

PROFILER = "torchtune.training.setup_torch_profiler"


@dataclass(frozen=True, config=STRICT)
class RunSettings:
    """Length, log, checkpoints and exports of a run."""

    output_dir: FilePath
    """Folder of checkpoints and exported models, shared by all ranks."""
    epochs: Count = 1
    """Number of passes over the dataset."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    """Seed of dropout, new adapters and fresh vision transformers; samples have ``data_seed``. null draws a seed."""
    cudnn_deterministic_mode: Literal["default", "warn", "error", 0, 1, 2] | None = None
    """Argument of ``torch.set_deterministic_debug_mode``."""
    log_every_n_steps: Count = 1
    """Update steps between log lines. On a GPU, metrics are read after the next update step is enqueued."""
    metric_logger: Component | None = None
    """A torchtune metric logger, such as ``torchtune.training.metric_logging.DiskLogger``."""
    log_peak_memory_stats: bool = False
    """Also logs peak memory (not on CPU)."""
    profiler: Annotated[dict[str, Any], MadeWith(default=PROFILER)] | None = None
    """torchtune's profiler, stepped once per update step."""
    run_val_every_n_steps: Count | None = None
    """Update steps between validations on ``dataset_val``; null does not validate."""
    keep_best_checkpoint: Annotated[bool, OnlyWith("run_val_every_n_steps")] = False
    """Exports the model to ``best`` at each new lowest ``val_loss``."""
    sample_prompts: Annotated[list[str], Field(min_length=1)] | None = None
    """Prompts answered every ``sample_every_n_steps``; answers are logged, also in ``logs/samples.jsonl``."""
    sample_every_n_steps: Count | None = None
    """Update steps between answers to ``sample_prompts``."""
    sample_max_new_tokens: Annotated[Count, OnlyWith("sample_prompts")] = 64
    """Maximum length of an answer [tokens], decoded greedily."""
    save_every_n_steps: Count | None = None
    """Update steps between checkpoints; null saves at the end of epochs only."""
    save_every_n_minutes: Positive | None = None
    """Minutes between checkpoints, by rank 0's clock."""
    export_every_n_steps: Count | None = None
    """Update steps between exports in the checkpointer's format within epochs; all are kept."""
    export_dtype: Literal["fp32", "bf16"] | None = None
    """Precision of exported models; null is ``dtype``. Adapters merged into bf16 weights lose part of small changes
    to rounding."""
    save_adapter_weights_only: bool = False
    """Exports the adapters only, without the merged model."""
    keep_last_n_checkpoints: Count | None = 2
    """Number of newest checkpoints that are kept; null keeps all."""
    enable_async_checkpointing: bool = False
    """Copies checkpoints to the CPU and writes them in the background."""
    resume_from_checkpoint: bool | Literal["auto"] = False
    """Resumes from the newest complete checkpoint in ``output_dir``. ``auto`` starts from scratch if there is none. Both
    fail if every checkpoint is corrupt."""
    resume_with_other_data: bool = False
    """Resumes even if dataset, tokenizer or global batch size differ from those of the checkpoint."""
    resume_with_other_model: bool = False
    """Resumes even if ``model`` differs from that of the checkpoint, if the weights fit."""

    def problems(self) -> Iterator[Problem]:
        """Makes the output folder. Yields problems with it and between keys."""
        yield from problems_with_folder("output_dir", self.output_dir)
        if (self.sample_prompts is None) != (self.sample_every_n_steps is None):
            keys = ("sample_prompts", "sample_every_n_steps")
            yield Problem(
                ", ".join(keys), "one has no effect without the other; set both", depends_on=keys
            )

    def problems_with(self, ranks: RankSettings, dataset_val: Any) -> Iterator[Problem]:
        """Problems with validation data and ranks."""
        if self.run_val_every_n_steps is not None and dataset_val is None:
            yield Problem(
                "run_val_every_n_steps",
                "set dataset_val, too",
                self.run_val_every_n_steps,
                ("dataset_val",),
            )
        if self.sample_prompts is not None and ranks.pipeline_parallel_dim > 1:
            yield Problem(
                "sample_prompts",
                f"pipeline_parallel_dim={ranks.pipeline_parallel_dim} cannot generate; leave the key out, and "
                "sample from exported models",
                depends_on=("pipeline_parallel_dim",),
            )

    def problems_without_text(self) -> Iterator[Problem]:
        """Problems of keys that need a language model and a ``val_loss``."""
        if self.sample_prompts is not None:
            yield Problem(
                "sample_prompts", "a vision transformer generates no text; leave the key out"
            )
        if self.keep_best_checkpoint:
            yield Problem(
                "keep_best_checkpoint",
                "there is no val_loss here; set export_every_n_steps instead",
                True,
            )
