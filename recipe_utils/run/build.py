"""Builders of loaders and of vision transformers' optimizers."""

import logging
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer
from torchtune.utils import get_logger, log_rank_zero

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
from recipe_utils.loss.dataset_weights import LossWeightSettings
from recipe_utils.model.vision.vision_transformer import layer_of
from recipe_utils.optim.optimizer import make_optimizer, trained_parameters
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import build, naming


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
    loss_fn: Any = None,
) -> tuple[UpdateStepLoader, UpdateStepLoader | None]:
    """Builds the loaders of ``dataset`` and, if training validates, of ``dataset_val``.

    ``load`` builds a dataset, as :func:`.load_dataset`. With a ``loss_fn`` that sums named datasets
    their targets have weights, 1 in validation. Raises ConfigError for problems of both datasets.
    """
    validates = _validates(settings)
    dataset = build("dataset", load, cfg.dataset)
    dataset_val = build("dataset_val", load, cfg.dataset_val) if validates else None
    if makes_trees(dataset) or makes_trees(dataset_val):
        collator.take_trees()
    if hasattr(loss_fn, "sums_by_sample"):
        for each, weighing in ((dataset, settings), (dataset_val, LossWeightSettings())):
            if isinstance(each, Mixture):
                each.weigh = partial(weighing.weigh, each.loss_weights)
    # Pipeline schedules need certain numbers of microbatches.
    fill = settings.fill(ranks)
    loader = UpdateStepLoader(dataset, collator, settings, ranks, "dataset", fill, is_drawn=True)
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
) -> tuple[UpdateStepLoader, NearestNeighbors | None]:
    """Builds the loader of views of ``dataset`` and, if training validates, a k-NN classifier.

    The classifier predicts the classes of ``dataset_val`` from ``dataset_knn`` (null: ``dataset``).
    Raises ConfigError for problems of all datasets and for a transform that does not fit the model.
    """
    validates = _validates(settings)
    load = partial(load_dataset, check=check_is_image)
    load_labeled = partial(load_dataset, check=partial(check_is_image, with_labels=True))
    dataset = build("dataset", load, cfg.dataset)
    if validates:
        cfg_knn = cfg.get("dataset_knn") or cfg.dataset
        bank = build("dataset_knn", load_labeled, cfg_knn)
        images = build("dataset_val", load_labeled, cfg.dataset_val)
    fill = settings.fill(ranks)
    with naming():
        # The keys of views alone, which DataLoader workers can unpickle without the recipe.
        keys = {each.name: getattr(settings, each.name) for each in fields(ViewSettings)}
        views = Views(dataset, transform, ViewSettings(**keys), layout, settings.data_seed)
        collator: Any = ViewCollator(settings, layout)
        loader = UpdateStepLoader(views, collator, settings, ranks, "dataset", fill, is_drawn=True)
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
