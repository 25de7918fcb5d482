"""Builders of the loaders and the optimizer of a vision transformer."""

from dataclasses import fields
from functools import partial
from typing import Any

from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from recipe_utils.dinov3.backbone import layer_of
from recipe_utils.dinov3.images.crop_rows import TokenLayout
from recipe_utils.dinov3.images.folders import check_is_image
from recipe_utils.dinov3.images.multi_crop import MultiCrop
from recipe_utils.dinov3.images.views import ImageCollator, ViewCollator, Views, ViewSettings, WholeImages
from recipe_utils.dinov3.nearest_neighbors import NearestNeighbors
from recipe_utils.optim.optimizer import make_optimizer, trained_parameters
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import build, naming
from recipe_utils.text.datasets import load_dataset
from recipe_utils.training.loaders import build_loader, validates_dataset
from recipe_utils.update_steps.loader import RowBudget, UpdateStepLoader


def build_image_loaders(
    cfg: DictConfig, transform: MultiCrop, layout: TokenLayout, settings: Any, ranks: Ranks
) -> tuple[UpdateStepLoader, NearestNeighbors | None]:
    """Builds the loader of views of ``dataset`` and, if training validates, a k-NN classifier.

    The classifier predicts the classes of ``dataset_val`` from ``dataset_knn`` (null: ``dataset``).
    Raises ConfigError for problems of all datasets and for a transform that does not fit the model.
    """
    validates = validates_dataset(settings)
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
        budget = RowBudget(ViewCollator(settings, layout))
        loader = build_loader(views, budget, settings, ranks, "dataset", fill)
        if settings.ibot_loss_weight > 0:
            views.check_masks(settings.samples_per_update_step(ranks.dp_degree))
        if not validates:
            return loader, None
        data = settings.of_validation()
        budget = RowBudget(ImageCollator(data, layout))
        bank, images = (
            build_loader(WholeImages(each, transform, layout), budget, data, ranks, key, fill)
            for key, each in (("dataset_knn", bank), ("dataset_val", images))
        )
        return loader, NearestNeighbors(bank, images, settings.knn_neighbors, ranks)


def build_optimizer_by_depth(cfg: DictConfig, model: nn.Module, whole: Any, schedules: Any) -> Optimizer:
    """Builds the optimizer of a vision transformer with learning rates by depth.

    ``model`` may be pipeline stages of ``whole``; ``schedules`` are ScheduleSettings and OptimizerSettings.
    """
    num_layers = len(whole.layers)
    depth_of = partial(layer_of, num_layers=num_layers)
    layers = depth_of, num_layers + 2, bool(schedules.weight_decay_of_vectors)
    groups = schedules.groups_by_depth(trained_parameters(model), cfg, *layers)
    return make_optimizer(cfg, groups)
