"""Builders of the loaders and the optimizer of a vision transformer."""

from collections.abc import Callable
from functools import partial
from typing import Any

from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import nn
from torch.optim import Optimizer

from recipe_utils.data.loaders import build_loader, validates_dataset
from recipe_utils.dinov3.backbone import layer_of
from recipe_utils.dinov3.images.crop_rows import TokenLayout
from recipe_utils.dinov3.images.folders import check_is_image
from recipe_utils.dinov3.images.multi_crop import MultiCrop
from recipe_utils.dinov3.images.views import ImageCollator, ViewCollator, Views, ViewSettings, WholeImages
from recipe_utils.dinov3.nearest_neighbors import NearestNeighbors
from recipe_utils.dinov3.schedules import ScheduleSettings
from recipe_utils.dinov3.self_distillation import ObjectiveSettings
from recipe_utils.optim.optimizer import OptimizerSettings, make_optimizer, trained_parameters
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.components import Component
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import build, naming
from recipe_utils.text.mixture import load_dataset
from recipe_utils.training.log import Reported
from recipe_utils.update_steps.loader import RowBudget, UpdateStepLoader
from recipe_utils.update_steps.settings import DataSettings

IMAGES = Reported({"images": "images", "crop_tokens": "crop_tokens"}, "img", validation=("knn_accuracy",))
"""The student's tokens are ``crop_tokens``."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageComponents:
    """Components of a recipe for images."""

    model: Component
    """Backbone: ``recipe_utils.dinov3.dinov3_vit`` or one of its sizes."""
    dataset: Component | list[Component]
    """Map-style images; labels are ignored. A list is concatenated, or mixed by ``weight``."""
    checkpointer: Component
    """``recipe_utils.dinov3.DINOv3Checkpointer``. Loads a given backbone, saves the
    teacher's."""
    dataset_knn: Component | list[Component] | None = None
    """Labeled images that the k-NN classifier votes with; null is ``dataset``."""
    dataset_val: Component | list[Component] | None = None
    """Labeled images for the k-NN accuracy; requires ``run_val_every_n_steps``."""


def build_image_loaders(
    cfg: DictConfig,
    transform: MultiCrop,
    layout: TokenLayout,
    ranks: Ranks,
    *,
    data: DataSettings,
    views: ViewSettings,
    objective: ObjectiveSettings,
    num_to_run: Callable[[int], int] | None,
) -> tuple[UpdateStepLoader, NearestNeighbors | None]:
    """Builds the loader of views of ``dataset`` and, if training validates, a k-NN classifier.

    The classifier predicts the classes of ``dataset_val`` from ``dataset_knn`` (null: ``dataset``).
    ``num_to_run`` is that of a pipeline's schedule. Raises ConfigError for problems of all datasets and for a
    transform that does not fit the model.
    """
    validates = validates_dataset(cfg)
    load = partial(load_dataset, check=check_is_image)
    load_labeled = partial(load_dataset, check=partial(check_is_image, with_labels=True))
    dataset = build("dataset", load, cfg.dataset)
    if validates:
        cfg_knn = cfg.get("dataset_knn") or cfg.dataset
        bank = build("dataset_knn", load_labeled, cfg_knn)
        images = build("dataset_val", load_labeled, cfg.dataset_val)
    with naming():
        crops = Views(dataset, transform, views, layout, data.data_seed)
        budget = RowBudget(ViewCollator(data, views, layout))
        loader = build_loader(crops, budget, data, ranks, "dataset", num_to_run)
        if objective.ibot_loss_weight > 0:
            crops.check_masks(data.samples_per_update_step(ranks.dp_degree))
        if not validates:
            return loader, None
        # Both datasets of the classifier pass through the model in batches of validation.
        data = data.of_validation()
        budget = RowBudget(ImageCollator(data, layout))
        bank, images = (
            build_loader(WholeImages(dataset, transform, layout), budget, data, ranks, key, num_to_run)
            for key, dataset in (("dataset_knn", bank), ("dataset_val", images))
        )
        return loader, NearestNeighbors(bank, images, objective.knn_neighbors, ranks)


def build_optimizer_by_depth(
    cfg: DictConfig, model: nn.Module, meta_model: Any, schedules: ScheduleSettings, settings: OptimizerSettings
) -> Optimizer:
    """Builds the optimizer of a vision transformer with learning rates by depth.

    ``model`` may be pipeline stages of ``meta_model``.
    """
    num_layers = len(meta_model.layers)
    depth_of = partial(layer_of, num_layers=num_layers)
    layers = depth_of, num_layers + 2, bool(settings.weight_decay_of_vectors)
    groups = schedules.groups_by_depth(trained_parameters(model), cfg, *layers)
    return make_optimizer(cfg, groups, {})
