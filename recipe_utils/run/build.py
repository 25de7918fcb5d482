"""Builders of loaders and of vision transformers' optimizers; trial steps of optimizers."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer
from torchtune import config
from torchtune.utils import get_logger, log_rank_zero

from recipe_utils.checkpoint.tensors import optimizer_contents, restore_optimizer
from recipe_utils.data.images.collator import (
    ImageCollator,
    ViewCollator,
    Views,
    ViewSettings,
    WholeImages,
)
from recipe_utils.data.images.crop_rows import TokenLayout
from recipe_utils.data.images.folders import check_is_image
from recipe_utils.data.images.multi_crop import MultiCrop
from recipe_utils.data.loader.loader import UpdateStepLoader
from recipe_utils.data.loader.samples import load_dataset
from recipe_utils.data.mixture import Mixture
from recipe_utils.data.text.trees import makes_trees
from recipe_utils.evaluation.nearest_neighbors import NearestNeighbors
from recipe_utils.files import CheckpointError
from recipe_utils.loss.dataset_weights import LossWeightSettings
from recipe_utils.model.vision.vision_transformer import layer_of
from recipe_utils.optim.optimizer import inner_optimizers, make_optimizer, trained_parameters
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.run.run import Run
from recipe_utils.settings.problems import ConfigError, Problem, build, naming


def _validates(settings: Any) -> bool:
    """Returns True if training validates. Warns if ``dataset_val`` is unused."""
    validates = settings.run_val_every_n_steps is not None
    if not validates and settings.dataset_val is not None:
        text = "dataset_val: not used, because run_val_every_n_steps is not set"
        log_rank_zero(get_logger("INFO"), text, logging.WARNING)
    if validates and settings.dataset_val == settings.dataset:
        text = "dataset_val: it is dataset, so validation is on samples that are trained on"
        log_rank_zero(get_logger("INFO"), text, logging.WARNING)
    return validates


def build_loaders(
    cfg: DictConfig,
    load: Callable[..., Any],
    collator: Any,
    settings: Any,
    ranks: Ranks,
    run: Run,
    loss_fn: Any = None,
) -> tuple[UpdateStepLoader, UpdateStepLoader | None]:
    """Builds the loaders of ``dataset`` and, if training validates, of ``dataset_val``.

    ``load`` builds a dataset, as :func:`.load_dataset`. With a ``loss_fn`` that sums named datasets
    their targets have weights, 1 in validation. Raises ConfigError for problems of both datasets.
    """
    validates = _validates(settings)
    temperature = settings.of_mixture.temperature
    dataset = build("dataset", load, cfg.dataset, temperature=temperature)
    dataset_val = build("dataset_val", load, cfg.dataset_val) if validates else None
    if makes_trees(dataset) or makes_trees(dataset_val):
        collator.take_trees()
    if hasattr(loss_fn, "sums_datasets"):
        for each, weighing in ((dataset, settings), (dataset_val, LossWeightSettings())):
            if isinstance(each, Mixture):
                each.weigh = partial(weighing.weigh, each.loss_weights)
    # Pipeline schedules need certain numbers of microbatches.
    fill = settings.fill(ranks)
    drawn = (settings.epochs, run.saved_fingerprint)
    limits = getattr(collator, "limits", None)
    dropout_seed = run.seed if getattr(limits, "has_dropout", False) else None
    loader = UpdateStepLoader(
        dataset, collator, settings, ranks, "dataset", fill, *drawn, dropout_seed
    )
    if not validates:
        return loader, None
    data, collator = settings.of_validation(), collator.for_validation()
    val_loader = UpdateStepLoader(dataset_val, collator, data, ranks, "dataset_val", fill)
    if loader.max_tokens:
        val_loader.propose_tokens = lambda: loader.max_tokens
    return loader, val_loader


def build_image_loaders(
    cfg: DictConfig,
    transform: MultiCrop,
    layout: TokenLayout,
    settings: Any,
    ranks: Ranks,
    run: Run,
) -> tuple[UpdateStepLoader, NearestNeighbors | None]:
    """Builds the loader of views of ``dataset`` and, if training validates, a k-NN classifier.

    The classifier predicts the classes of ``dataset_val`` from ``dataset_knn`` (null: ``dataset``).
    Raises ConfigError for problems of all datasets and for a transform that does not fit the model.
    """
    validates = _validates(settings)
    temperature = settings.of_mixture.temperature
    load = partial(load_dataset, check=check_is_image)
    load_labeled = partial(load_dataset, check=partial(check_is_image, with_labels=True))
    dataset = build("dataset", load, cfg.dataset, temperature=temperature)
    if validates:
        cfg_knn = cfg.get("dataset_knn") or cfg.dataset
        bank = build("dataset_knn", load_labeled, cfg_knn)
        images = build("dataset_val", load_labeled, cfg.dataset_val)
    fill = settings.fill(ranks)
    with naming():
        views = Views(dataset, transform, _of_views(settings), layout, settings.data_seed)
        collator: Any = ViewCollator(settings, layout)
        drawn = (settings.epochs, run.saved_fingerprint)
        loader = UpdateStepLoader(views, collator, settings, ranks, "dataset", fill, *drawn)
        if settings.ibot_loss_weight > 0:
            views.check_masks(loader.global_batch_size)
        if not validates:
            return loader, None
        data = settings.of_validation()
        collator = ImageCollator(data, layout)
        bank, images = (
            UpdateStepLoader(WholeImages(each, transform, layout), collator, data, ranks, key, fill)
            for key, each in (("dataset_knn", bank), ("dataset_val", images))
        )
        return loader, NearestNeighbors(bank, images, settings.knn_neighbors, ranks)


def _of_views(settings: Any) -> ViewSettings:
    """Returns the keys of views alone, which DataLoader workers can unpickle without the recipe."""
    return ViewSettings(
        **{each.name: getattr(settings, each.name) for each in fields(ViewSettings)}
    )


def try_optimizer(
    cfg: DictConfig, cfg_lr_scheduler: DictConfig | None, settings: Any, device: torch.device
) -> None:
    """Steps a small module, saves and restores the state, and steps again, before weights are loaded.

    The module has a matrix, a vector and an embedding. Raises ValueError if a step fails, as those
    of optimizers that compute the loss again do, or if checkpoints cannot hold the state. A run that
    saves none only warns of the latter.
    """
    if not math.isfinite(cfg.get("lr") or 0):
        raise ValueError(f"optimizer.lr={cfg.lr}: it must be finite")
    if cfg.get("maximize"):
        raise ValueError("optimizer.maximize=True: it would raise the loss; take it out")
    device = device if device.type == "cuda" else torch.device("cpu")  # kernels may be CUDA's only
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with forked, torch.compiler.set_stance("force_eager"):
        problem = _problem_with_steps(cfg, cfg_lr_scheduler, settings, device)
    if problem is None:
        return
    problem = f"optimizer._component_={cfg._component_.rpartition('.')[2]}: {problem}"
    if settings.saves_checkpoints:
        remedy = "set recipe_utils.optim.AdamW8bit or another one, or epochs=1 without save_every_* and resume_from_checkpoint"
        raise ValueError(f"{problem}; {remedy}")
    log_rank_zero(get_logger("INFO"), f"{problem}; this run saves none", logging.WARNING)


def _problem_with_steps(cfg: Any, cfg_schedule: Any, settings: Any, device: Any) -> str | None:
    """Returns why a checkpoint does not hold the state of an optimizer; None if it does."""
    name = f"optimizer._component_={cfg._component_.rpartition('.')[2]}"
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        modules = {"embedding": nn.Embedding(128, 64), "lora_b": nn.Linear(64, 64)}
        models.append(nn.ModuleDict({"layers": nn.ModuleDict(modules)}).to(device))

    def make(model: nn.Module) -> Optimizer:
        parameters = trained_parameters(model)
        if settings.optimizer_in_bwd:
            for parameter in parameters.values():
                make_optimizer(cfg, [parameter])
        return make_optimizer(cfg, settings.groups(parameters))

    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        torch.manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape).to(device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    try:
        scheduled = make(models[0])
    except ValueError as error:
        try:
            make_optimizer(cfg, [nn.Parameter(torch.zeros(2, 2))])
        except ValueError:
            raise error from None
        text = "it takes matrices only, and norms and biases are vectors; wrap it with another"
        raise ValueError(f"{name}: {text} optimizer, as the recipe's page shows") from error
    if cfg_schedule is not None and (num := cfg_schedule.get("num_warmup_steps", 0)) < 0:
        raise ConfigError(Problem("lr_scheduler.num_warmup_steps", "it must be at least 0", num))
    config.instantiate(cfg_schedule, scheduled, num_training_steps=1, last_epoch=-1)
    (model, other), (optimizer, fresh) = models, [make(model) for model in models]
    try:
        step(model, optimizer, 1)
        step(model, optimizer, 2)
    except Exception as error:  # any: the optimizer may be third-party code
        text = "training makes one step for each gradient, dense and without a closure"
        raise ValueError(f"{name}: {text}, which fails: {error}; set another optimizer") from error
    try:
        tensors, description = optimizer_contents(model, optimizer)
        description = json.loads(json.dumps(description))
        for key, empty in restore_optimizer(other, fresh, description, tensors).items():
            empty.copy_(tensors[key])
    except (ValueError, CheckpointError) as error:
        return f"checkpoints cannot hold its state ({error})"
    other.load_state_dict(model.state_dict())
    for each, its_optimizer in ((model, optimizer), (other, fresh)):
        step(each, its_optimizer, 3)
    resumes = all(map(torch.equal, model.parameters(), other.parameters()))
    before = [parameter.detach().clone() for parameter in other.parameters()]
    if cfg_schedule is not None and inner_optimizers(fresh):
        for group in fresh.param_groups:
            group["lr"] *= 0
        step(other, fresh, 4)
        if not all(map(torch.equal, before, other.parameters())):
            text = "its inner optimizers do not step with the rates of its param_groups"
            raise ValueError(
                f"{name}: {text}, which lr_scheduler sets; let them share their groups"
            )
    if resumes:
        return None
    return "a resumed training would differ, since it keeps more than `state` and `param_groups`"


def build_optimizer_by_depth(
    cfg: DictConfig, model: nn.Module, whole: Any, schedules: Any
) -> Optimizer:
    """Builds the optimizer of a vision transformer with learning rates by depth.

    ``model`` may be pipeline stages of ``whole``; ``schedules`` are ScheduleSettings and OptimizerSettings.
    """
    num_layers = len(whole.layers)
    depth_of = partial(layer_of, num_layers=num_layers)
    layers = depth_of, num_layers + 2, bool(schedules.weight_decay_of_vectors)
    groups = schedules.groups_by_depth(trained_parameters(model), cfg, *layers)
    return make_optimizer(cfg, groups)
