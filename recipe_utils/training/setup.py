"""What the ``setup`` of every recipe builds, in the order in which a recipe calls it.

A recipe builds its loss after the components, and its data before the model, since rows depend on both:

    built = build_components(cfg, settings, run)        errors name the key; no weight is read
    self.model = build_model(built, loader, rows, ...)  stages are changed, then parallelized, then get their weights
    self.stepper = build_stepper(built, self.model)     optimizer, guard against gradients that are not finite, schedule
    add_usual_parts(built, ...)                         memory, losses by sample and dataset, validation, answers, exports
    resume_run(built, ...)                                from a checkpoint, if configured
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig
from torch import Tensor, nn

from recipe_utils.checkpoint.own_modules import with_own_modules
from recipe_utils.models.adapters.adapted_linear import speed_up_adapters
from recipe_utils.models.construct import build_on_meta, without_dropout
from recipe_utils.models.distribute import small_model
from recipe_utils.models.frozen import reference_checkpointer
from recipe_utils.models.pipeline.microbatches import Pipeline
from recipe_utils.models.pipeline.schedule import num_to_run
from recipe_utils.models.runner import Rows, Runner, Whole, build_modules, build_runner
from recipe_utils.models.weights import load_model
from recipe_utils.optim.optimizer import check_optimizer
from recipe_utils.optim.stepper import Stepper
from recipe_utils.settings.problems import build, naming
from recipe_utils.torchtune_names import instantiate
from recipe_utils.training.parts.answers import Answers
from recipe_utils.training.parts.budget import StepMemory
from recipe_utils.training.parts.exports import Exports
from recipe_utils.training.parts.sample_losses import DatasetLosses, SampleLosses
from recipe_utils.training.parts.validation import Validation
from recipe_utils.training.resume import Trained
from recipe_utils.training.run import Run
from recipe_utils.training.settings import RecipeSettings
from recipe_utils.update_steps.loader import UpdateStepLoader


@dataclass(frozen=True)
class Built:
    """Components of a training, of which no weight was read, with their config."""

    cfg: DictConfig
    settings: RecipeSettings
    run: Run
    tokenizer: Any
    """None of images."""
    meta_model: Any
    """Whole trained model on the meta device. A recipe may still change it: freeze layers, add modules."""
    checkpointer: Any
    ref_checkpointer: Any
    """That of a reference: of ``ref_checkpointer``, or the trained model's."""

    @property
    def num_to_run(self) -> Callable[[int], int] | None:
        """Maps microbatches of the data to those that the schedule of pipeline stages runs; None without stages."""
        return num_to_run(self.settings.pipeline, self.run.ranks)

    def with_own_modules(self, *names: str) -> "Built":
        """Returns components whose checkpointer also loads and exports modules that were added to ``meta_model``."""
        own = with_own_modules(self.checkpointer, self.meta_model, names, self.run.seed)
        return replace(self, checkpointer=own)


def build_components(
    cfg: DictConfig,
    settings: RecipeSettings,
    run: Run,
    make_model: Callable[[], nn.Module] | None = None,
    *,
    drops: bool = True,
) -> Built:
    """Builds tokenizer, model and checkpointers, and tries the optimizer on a small model.

    ``make_model`` builds the model; None: the component ``model``. If not ``drops``, it has no dropout, see
    :func:`.without_dropout`: for losses that compare log-probabilities of two forwards. Raises ConfigError with the key
    that cannot be built.
    """
    tokenizer = build("tokenizer", instantiate, cfg.get("tokenizer"))
    make_model = make_model or partial(instantiate, cfg.model)
    meta_model = build("model", build_on_meta, make_model, settings.model)
    meta_model = meta_model if drops else without_dropout(meta_model, cfg.model)
    checkpointer = build("checkpointer", instantiate, cfg.checkpointer)
    small = small_model(meta_model, settings.model, run.ranks)  # whose parameters are sharded as the model's
    build("optimizer", check_optimizer, cfg.optimizer, cfg.get("lr_scheduler"), settings.optimizer, small)
    key = "ref_checkpointer"
    reference = build(key, reference_checkpointer, cfg.get(key), meta_model, checkpointer)
    return Built(cfg, settings, run, tokenizer, meta_model, checkpointer, reference)


def build_model(
    built: Built, loader: UpdateStepLoader, rows: Rows | None, loss_of: Callable[[Any], Any], sums: Sequence[str]
) -> Whole | Pipeline:
    """Builds the trained model, opens the log and loads the weights. All ranks together, after all other checks.

    ``loss_of`` maps the stage with the output layer, or the whole model, to its loss module, which returns ``sums``;
    ``rows`` are those that attention computes, see :func:`.build_modules`. Raises ConfigError.
    """
    cfg, settings, run, meta_model = built.cfg, built.settings, built.run, built.meta_model
    ranks, pipeline = run.ranks, settings.pipeline
    with naming():
        module = build_modules(meta_model, loss_of, settings.model, pipeline, ranks, rows)
    run.open_log(cfg, meta_model, module, loader)
    fingerprints = load_model(module, built.checkpointer, cfg.checkpointer, settings.model, ranks, run.seed)
    return build_runner(module, settings.model, pipeline, ranks, len(sums), fingerprints)


def build_stepper(
    built: Built, model: Runner, groups: Callable[[Mapping[str, nn.Parameter]], list[Any]] | None = None
) -> Stepper:
    """Builds the optimizer of a model, with its guard and schedule.

    ``groups`` maps parameters by name to the optimizer's first argument; None: those of the settings.
    """
    stepper = Stepper(built.cfg, model, built.settings.optimizer, model.device, groups)
    speed_up_adapters(model.module, stepper.optimizer)
    return stepper


def add_usual_parts(
    built: Built,
    model: Runner,
    stepper: Stepper,
    validate: Callable[[], Mapping[str, Tensor | float]],
    loader: UpdateStepLoader,
    val_loader: UpdateStepLoader | None,
    loss_fn: Any = None,
) -> None:
    """Adds the parts of any training: memory, losses by sample and by dataset, validation, answers, exports.

    ``loss_fn`` None, of images: a loss that couples images is that of no sample or dataset.
    """
    run, settings, parts, every = built.run, built.settings, built.run.parts, built.settings.run
    parts.add("budget", StepMemory(run, loader, stepper.optimizer))
    by_dataset = None
    if loss_fn is not None:
        if settings.data.sample_losses:
            parts.add("sample_losses", SampleLosses(run, loader, loss_fn))
        by_dataset = DatasetLosses(run, loss_fn, loader, val_loader)
        parts.add("by_dataset", by_dataset)
    parts.add_every(every.run_val_every_n_steps, "validation", Validation(run, validate, by_dataset), at_ends=True)
    if built.tokenizer is not None:
        parts.add_every(every.sample_every_n_steps, "answers", Answers(run, model.module, built.tokenizer))
    parts.add_every(every.export_every_n_steps, "exports", Exports(run))


def resume_run(
    built: Built,
    model: Runner,
    stepper: Stepper,
    loader: UpdateStepLoader,
    fingerprints: Mapping[str, str] = MappingProxyType({}),
    saved: nn.Module | None = None,
    exported: nn.Module | None = None,
) -> None:
    """Resumes training if configured; see :meth:`.Run.resume`. Call it after all parts are added.

    ``fingerprints`` are those of further frozen models. ``saved`` are the modules of a checkpoint and ``exported`` those of
    an export; None: the trained model.
    """
    found = {**model.fingerprints, **fingerprints}
    built.run.resume(Trained(saved or model.module, stepper, loader, built.checkpointer, found, exported))
