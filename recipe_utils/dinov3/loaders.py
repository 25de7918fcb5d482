"""Builders of the loaders and the optimizer of a vision transformer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from recipe_utils.data.loaders import build_loader, validates_dataset
from recipe_utils.dinov3.backbone import fresh_vit_weights, layer_of
from recipe_utils.dinov3.images.crop_rows import layout_of
from recipe_utils.dinov3.images.folders import check_is_image
from recipe_utils.dinov3.images.multi_crop import MultiCrop
from recipe_utils.dinov3.images.views import ImageCollator, ViewCollator, Views, ViewSettings, WholeImages
from recipe_utils.dinov3.nearest_neighbors import NearestNeighbors
from recipe_utils.dinov3.schedules import ScheduleSettings
from recipe_utils.dinov3.self_distillation import ObjectiveSettings
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.components import Component
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import build, naming
from recipe_utils.text.mixture import load_dataset
from recipe_utils.torchtune_names import MODEL_KEY
from recipe_utils.training.log import Reported
from recipe_utils.training.setup import Built
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
    meta_model: nn.Module,
    ranks: Ranks,
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
    validates, layout = validates_dataset(cfg), layout_of(meta_model)
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


def with_fresh_weights(built: Built) -> Built:
    """Returns components whose checkpointer draws the weights that it does not load: those of heads, or all."""
    return replace(built, checkpointer=FreshWeights(built.checkpointer, built.meta_model, built.run.seed))


class FreshWeights:
    """Checkpointer of a given backbone, if any, beside new weights that depend on a seed. It keeps them for the teachers."""

    def __init__(self, checkpointer: Any, meta_model: nn.Module, seed: int) -> None:
        self._checkpointer, self._meta_model, self._seed = checkpointer, meta_model, seed

    def load_checkpoint(self) -> dict[str, Any]:
        """Returns all weights."""
        return {MODEL_KEY: dict(self._weights)}

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        weights = fresh_vit_weights(self._meta_model, self._seed)
        return weights | self._checkpointer.load_checkpoint()[MODEL_KEY]


def groups_by_depth(
    built: Built, schedules: ScheduleSettings
) -> Callable[[Mapping[str, nn.Parameter]], list[dict[str, Any]]]:
    """Returns a function from parameters by name to an optimizer's groups, with learning rates by depth."""
    num_layers = len(built.meta_model.layers)
    depth_of = partial(layer_of, num_layers=num_layers)
    decays = bool(built.settings.optimizer.weight_decay_of_vectors)
    return lambda parameters: schedules.groups_by_depth(
        parameters, built.cfg.optimizer, depth_of, num_layers + 2, decays
    )
