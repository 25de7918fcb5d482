"""Keys of a run: length, log, checkpoints, exports."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field
from pydantic.dataclasses import dataclass

from recipe_utils.data.dataset_weights import problems_with_datasets, refused_weights
from recipe_utils.data.meter import budget_on_ranks
from recipe_utils.models.pipeline.schedule import PipelineSettings, pipeline_on_ranks
from recipe_utils.models.settings import ModelSettings, model_on_ranks
from recipe_utils.optim.optimizer import OptimizerSettings, optimizer_on_ranks
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.settings.components import Component, MadeWith
from recipe_utils.settings.keys import STRICT, Count, FilePath, OnlyWith, Positive
from recipe_utils.settings.problems import Problem, problems_with_folder
from recipe_utils.update_steps.settings import DataSettings, data_on_ranks

PROFILER = "torchtune.training.setup_torch_profiler"
_OfTokenizer = Annotated[dict[str, Any], MadeWith(num_positional=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunSettings:
    """Length, log, checkpoints and exports of a run."""

    output_dir: FilePath
    """Folder for checkpoints and exported models, shared by all ranks."""
    epochs: Count = 1
    """Passes over the dataset."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    """Seed of dropout and new weights; null draws one, and resumes with the checkpoint's."""
    cudnn_deterministic_mode: Literal["default", "warn", "error", 0, 1, 2] | None = None
    """Argument of ``torch.set_deterministic_debug_mode``."""
    log_every_n_steps: Count | None = 1
    """Update steps between log lines; null is 1."""
    log_config: bool = False
    """Also prints the resolved config, which ``logs/config.yaml`` contains."""
    metric_logger: Component | None = None
    """A torchtune metric logger, such as ``torchtune.training.metric_logging.DiskLogger``."""
    log_peak_memory_stats: bool = False
    """Also logs peak memory (not on CPU)."""
    profiler: Annotated[dict[str, Any], MadeWith(default=PROFILER)] | None = None
    """torchtune's profiler, stepped once per update step. Its ``output_dir`` is relative to the key
    ``output_dir``."""
    run_val_every_n_steps: Count | None = None
    """Update steps between validations, besides one before and one after the training; null disables them."""
    keep_best_checkpoint: Annotated[bool, OnlyWith("run_val_every_n_steps")] = False
    """Exports the model to ``best`` at each new best validation: the lowest ``val_loss``, of a policy with
    ``sampler_val`` the highest ``val_reward``, of images the highest ``knn_accuracy``."""
    early_stopping_patience: Annotated[Count | None, OnlyWith("run_val_every_n_steps")] = None
    """Validations in a row without a new best one that end the training; null trains all epochs."""
    early_stopping_threshold: Annotated[float, Field(ge=0), OnlyWith("early_stopping_patience")] = 0.0
    """Amount by which a validation must be better than the best one to count as a new best for
    ``early_stopping_patience``."""
    sample_prompts: Annotated[list[str | dict[str, str]], Field(min_length=1)] | None = None
    """Prompts; with an image ``{image: /data/1.png, text: What is it?}``. Answers are logged, and appended to ``logs/samples.jsonl``."""
    sample_every_n_steps: Count | None = None
    """Update steps between answers to ``sample_prompts``."""
    sample_max_new_tokens: Annotated[Count, OnlyWith("sample_prompts")] = 64
    """Maximum length of an answer [tokens], decoded greedily."""
    save_every_n_steps: Count | None = None
    """Update steps between checkpoints; null saves at the end of epochs only."""
    save_every_n_minutes: Positive | None = None
    """Minutes between checkpoints, by rank 0's clock."""
    export_every_n_steps: Count | None = None
    """Update steps between exports within an epoch."""
    export_dtype: Literal["fp32", "bf16"] | None = None
    """Precision of exported models; null is ``dtype``."""
    save_adapter_weights_only: bool = False
    """Exports only the adapters."""
    keep_last_n_exports: Count | None = None
    """Newest exports to keep besides ``best``; null keeps all."""
    keep_last_n_checkpoints: Count | None = 2
    """Newest checkpoints to keep; null keeps all."""
    enable_async_checkpointing: bool = False
    """Copies checkpoints to the CPU and writes them in the background."""
    resume_from_checkpoint: bool | Literal["auto"] = False
    """Resumes from the newest complete checkpoint in ``output_dir``; ``auto`` starts from scratch
    without one."""
    resume_with_other_data: bool = False
    """Resumes even if dataset, tokenizer or global batch size differ."""
    resume_with_other_model: bool = False
    """Resumes even if ``model`` differs, provided that the weights fit."""

    @property
    def saves_checkpoints(self) -> bool:
        """True if training saves checkpoints unless it is stopped, or resumes from one."""
        every = self.save_every_n_steps or self.save_every_n_minutes
        return self.epochs > 1 or bool(every or self.resume_from_checkpoint)

    def warnings(self, num_steps: int) -> Iterator[str]:
        """Yields warnings of intervals that are longer than a training of ``num_steps``."""
        for name in ("log", "run_val", "sample", "save", "export"):
            every = getattr(self, f"{name}_every_n_steps")
            if every is not None and every > num_steps:
                yield f"{name}_every_n_steps={every}: the training has only {num_steps} update steps"

    def problems(self) -> Iterator[Problem]:
        """Yields problems with the output folder, and between the keys."""
        yield from problems_with_folder("output_dir", self.output_dir)
        if (self.sample_prompts is None) != (self.sample_every_n_steps is None):
            yield Problem("sample_prompts, sample_every_n_steps", "one has no effect without the other; set both")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextComponents:
    """Components of a recipe for text."""

    model: Component
    """Trained model (the student of a distillation): a torchtune decoder, a fusion model with a ``decoder`` (not with
    pairs), or a transformers folder: recipe_utils.models.causal_lm."""
    tokenizer: Component
    """A torchtune tokenizer, or that of a transformers folder:
    recipe_utils.text.folder_tokenizer. Its ``max_seq_len`` truncates samples."""
    dataset: _OfTokenizer | list[_OfTokenizer]
    """Map-style dataset, identical on all ranks. A list is concatenated, or mixed by ``weight``."""
    checkpointer: Component
    """A torchtune checkpointer, or FolderCheckpointer (transformers): loads and saves weights."""
    dataset_val: _OfTokenizer | list[_OfTokenizer] | None = None
    """Validation dataset; requires ``run_val_every_n_steps``."""


class Components(Protocol):
    """Components that every recipe has."""

    @property
    def model(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def dataset(self) -> Any: ...  # noqa: D102
    @property
    def dataset_val(self) -> Any: ...  # noqa: D102
    @property
    def checkpointer(self) -> Mapping[str, Any]: ...  # noqa: D102


class RecipeSettings(Protocol):
    """Groups of keys that every recipe has; settings are frozen, hence properties."""

    @property
    def components(self) -> Components: ...  # noqa: D102
    @property
    def model(self) -> ModelSettings: ...  # noqa: D102
    @property
    def pipeline(self) -> PipelineSettings: ...  # noqa: D102
    @property
    def optimizer(self) -> OptimizerSettings: ...  # noqa: D102
    @property
    def run(self) -> RunSettings: ...  # noqa: D102
    @property
    def data(self) -> DataSettings: ...  # noqa: D102
    @property
    def ranks(self) -> RankSettings: ...  # noqa: D102


def problems_between(
    settings: RecipeSettings,
    *,
    must_divide: bool = False,
    weighs_datasets: bool = False,
    validates_otherwise: bool = False,
) -> Iterator[Problem]:
    """Yields keys that exclude each other in any recipe.

    With ``must_divide``, ``global_batch_size`` must divide into whole microbatches. Unless the recipe ``weighs_datasets``,
    ``loss_weight`` of their entries is refused. Unless it ``validates_otherwise``, validation needs ``dataset_val``.
    """
    data, ranks, run, components = settings.data, settings.ranks, settings.run, settings.components
    # Each group against the others that it depends on, then keys of a run against the recipe's components.
    yield from data_on_ranks(data, ranks, must_divide)
    yield from budget_on_ranks(data, ranks)
    yield from pipeline_on_ranks(settings.pipeline, data, ranks)
    yield from model_on_ranks(settings.model, ranks)
    yield from optimizer_on_ranks(settings.optimizer, data, ranks)
    yield from problems_with_datasets(data, components.dataset, components.dataset_val)
    if not weighs_datasets:
        yield from refused_weights(dataset=components.dataset, dataset_val=components.dataset_val)
    every = run.run_val_every_n_steps
    if every is not None and components.dataset_val is None and not validates_otherwise:
        yield Problem("run_val_every_n_steps", "set dataset_val, too", every)
    if run.sample_prompts is not None and ranks.pipeline_parallel_dim > 1:
        stages = f"pipeline_parallel_dim={ranks.pipeline_parallel_dim}"
        yield Problem("sample_prompts", f"{stages} cannot generate; leave the key out, and sample from exported models")
    for name in ("should_load_recipe_state", "resume_from_checkpoint"):
        if components.checkpointer.get(name):
            text = "training does not resume from torchtune's recipe_state.pt; take it out"
            yield Problem(f"checkpointer.{name}", text, True)
