"""Builds the loaders of a recipe's datasets, for training and validation."""

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from recipe_utils.data.images.crop_rows import TokenLayout
from recipe_utils.data.images.labelled import ImageSamples, WholeImages
from recipe_utils.data.images.multi_crop import MultiCrop
from recipe_utils.data.loader.loader import UpdateStepLoader
from recipe_utils.evaluation.nearest_neighbors import NearestNeighbors
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.run.run import Run
from recipe_utils.settings.problems import collected_problems, naming


def build_loaders(
    cfg: DictConfig,
    load: Callable[[Any], Any],
    collator: Any,
    settings: Any,
    ranks: Ranks,
    run: Run,
) -> tuple[UpdateStepLoader, UpdateStepLoader | None]:
    """Builds the loaders of ``dataset`` and, if training validates, of ``dataset_val``.

    Args:
        cfg: whole config.
        load: makes a dataset of its config.
        collator: collator of the training data; its ``for_validation()`` is that of ``dataset_val``.
        settings: settings of the recipe.
        ranks: ranks of the job.
        run: decides whether training validates.

    Raises:
        recipe_utils.settings.problems.ConfigError: problems of both datasets.
    """
    validates = run.validates_on(settings.dataset_val)
    with collected_problems() as build:
        dataset = build("dataset", load, cfg.dataset)
        dataset_val = build("dataset_val", load, cfg.dataset_val) if validates else None
    # Pipeline schedules need certain numbers of microbatches.
    fill = settings.pipeline.fill(ranks) if hasattr(settings, "pipeline") else None
    loader = UpdateStepLoader(dataset, collator, settings.data, ranks, "dataset", fill)
    loader.log_epoch_size()
    if not validates:
        return loader, None
    data, collator = settings.data.of_validation(), collator.for_validation()
    return loader, UpdateStepLoader(dataset_val, collator, data, ranks, "dataset_val", fill)


def build_neighbors(
    bank: Any,
    images: Any,
    transform: MultiCrop,
    layout: TokenLayout,
    settings: Any,
    ranks: Ranks,
    fill: Callable[[int], int] | None,
) -> NearestNeighbors:
    """Builds the k-NN classifier that validates a backbone.

    Args:
        bank: labelled images that vote.
        images: labelled images that are classified.
        transform: resizes and normalises images.
        layout: the model's tokens.
        settings: settings of the recipe.
        ranks: ranks of the job.
        fill: pads the number of microbatches for a pipeline schedule.

    Raises:
        recipe_utils.settings.problems.ConfigError: the transform does not fit the model, or there are fewer
            images than neighbors.
    """
    data = settings.data.of_validation()
    collator = ImageSamples(data, layout)
    with naming():
        bank, images = (
            UpdateStepLoader(
                WholeImages(each, transform, layout), collator, data, ranks, name, fill
            )
            for name, each in (("dataset_knn", bank), ("dataset_val", images))
        )
        return NearestNeighbors(bank, images, settings.objective.knn_neighbors, ranks)
