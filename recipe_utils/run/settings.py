"""The keys of a run: how long it goes, what it logs, and when it saves what."""

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
    """How long a training goes, what it logs, and when it saves what."""

    output_dir: FilePath
    """Where checkpoints and exported models go; all ranks must see the same folder."""
    epochs: Count = 1
    """Passes over the dataset."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    """Of dropout, new adapters and fresh vision transformers, not of the samples (``data_seed``); null draws one."""
    cudnn_deterministic_mode: Literal["default", "warn", "error", 0, 1, 2] | None = None
    """As ``torch.set_deterministic_debug_mode`` takes it."""
    log_every_n_steps: Count = 1
    """Update steps. On a GPU metrics are read once it has the next update step to do."""
    metric_logger: Component | None = None
    """Where metrics go, such as torchtune.training.metric_logging.DiskLogger."""
    log_peak_memory_stats: bool = False
    """Logs memory, too, but on a CPU."""
    profiler: Annotated[dict[str, Any], MadeWith(default=PROFILER)] | None = None
    """torchtune's; one of its steps is one update step."""
    run_val_every_n_steps: Count | None = None
    """Update steps between validations on ``dataset_val``; null for none."""
    keep_best_checkpoint: Annotated[bool, OnlyWith("run_val_every_n_steps")] = False
    """Exports the model to ``best`` whenever a validation finds a lower ``val_loss`` than all before."""
    sample_prompts: Annotated[list[str], Field(min_length=1)] | None = None
    """What the model is asked every ``sample_every_n_steps``; answers go to the log and ``logs/samples.jsonl``."""
    sample_every_n_steps: Count | None = None
    """Update steps between answers to ``sample_prompts``."""
    sample_max_new_tokens: Annotated[Count, OnlyWith("sample_prompts")] = 64
    """Longest answer [tokens]; of each token the likeliest is taken."""
    save_every_n_steps: Count | None = None
    """Update steps between checkpoints; null saves at epoch ends only."""
    save_every_n_minutes: Positive | None = None
    """A checkpoint by rank 0's clock, too."""
    export_every_n_steps: Count | None = None
    """Exports the model in the checkpointer's format within epochs, too; all are kept."""
    export_dtype: Literal["fp32", "bf16"] | None = None
    """Of exported models; null is ``dtype``, whatever ``weights_dtype``. Where adapters are merged into bf16, much of
    a small change is lost."""
    save_adapter_weights_only: bool = False
    """Exports the adapters without the model that they are merged into."""
    keep_last_n_checkpoints: Count | None = 2
    """How many checkpoints to go on from are kept; null keeps all."""
    enable_async_checkpointing: bool = False
    """Copies to the CPU, and writes checkpoints behind the next update steps."""
    resume_from_checkpoint: bool | Literal["auto"] = False
    """Goes on from the newest whole checkpoint in ``output_dir``; ``auto`` starts anew where there is none, for
    restarts that nobody watches. Where all are damaged neither does."""
    resume_with_other_data: bool = False
    """Goes on although dataset, tokenizer or global batch are not those of the checkpoint."""
    resume_with_other_model: bool = False
    """Goes on although ``model`` is not that of the checkpoint, if its weights fit."""

    def problems(self) -> Iterator[Problem]:
        """Whether the output folder can be made and written to; makes it."""
        yield from problems_with_folder("output_dir", self.output_dir)
        if (self.sample_prompts is None) != (self.sample_every_n_steps is None):
            keys = ("sample_prompts", "sample_every_n_steps")
            yield Problem(
                ", ".join(keys), "one is of no use without the other; set both", depends_on=keys
            )

    def problems_with(self, ranks: RankSettings, dataset_val: Any) -> Iterator[Problem]:
        """What is wrong with validation data and ranks."""
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
                f"no answers with pipeline_parallel_dim={ranks.pipeline_parallel_dim}, a schedule "
                "takes whole update steps; leave the key out, and ask exported models",
                depends_on=("pipeline_parallel_dim",),
            )

    def problems_without_text(self) -> Iterator[Problem]:
        """Of a recipe whose model says no text and has no ``val_loss``."""
        if self.sample_prompts is not None:
            yield Problem(
                "sample_prompts", "a vision transformer answers nothing; leave the key out"
            )
        if self.keep_best_checkpoint:
            yield Problem(
                "keep_best_checkpoint",
                "there is no val_loss here; set export_every_n_steps instead",
                True,
            )
