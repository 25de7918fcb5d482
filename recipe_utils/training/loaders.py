"""Builders of loaders."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from omegaconf import DictConfig
from torchtune.utils import get_logger, log_rank_zero

from recipe_utils.losses.dataset_weights import LossWeightSettings
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import build
from recipe_utils.text.mixture import Mixture
from recipe_utils.text.trees import makes_trees
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.settings import DataSettings


def validates_dataset(cfg: DictConfig) -> bool:
    """Returns True if training validates. Warns if ``dataset_val`` is unused."""
    validates = cfg.get("run_val_every_n_steps") is not None
    if not validates and cfg.get("dataset_val") is not None:
        text = "dataset_val: not used, because run_val_every_n_steps is not set"
        log_rank_zero(get_logger("INFO"), text, logging.WARNING)
    if validates and cfg.dataset_val == cfg.dataset:
        text = "dataset_val: it is dataset, so validation is on samples that are trained on"
        log_rank_zero(get_logger("INFO"), text, logging.WARNING)
    return validates


def build_loaders(
    cfg: DictConfig,
    load: Callable[..., Any],
    collator: Any,
    settings: DataSettings,
    ranks: Ranks,
    num_to_run: Callable[[int], int] | None = None,
    loss_fn: Any = None,
) -> tuple[UpdateStepLoader, UpdateStepLoader | None]:
    """Builds the loaders of ``dataset`` and, if training validates, of ``dataset_val``.

    ``load`` builds a dataset, as :func:`.load_dataset`; ``num_to_run`` is that of a pipeline's schedule. With a ``loss_fn`` that sums named datasets
    their targets have weights, 1 in validation. Raises ConfigError for problems of both datasets.
    """
    validates = validates_dataset(cfg)
    dataset = build("dataset", load, cfg.dataset)
    dataset_val = build("dataset_val", load, cfg.dataset_val) if validates else None
    if makes_trees(dataset) or makes_trees(dataset_val):
        collator.take_trees()
    if hasattr(loss_fn, "sums_by_sample") and isinstance(settings, LossWeightSettings):
        for each, weighing in ((dataset, settings), (dataset_val, LossWeightSettings())):
            if isinstance(each, Mixture):
                each.weigh = partial(weighing.weigh, each.loss_weights)
    loader = UpdateStepLoader(dataset, collator, settings, ranks, "dataset", num_to_run, is_drawn=True)
    if not validates:
        return loader, None
    data, collator = settings.of_validation(), collator.for_validation()
    val_loader = UpdateStepLoader(dataset_val, collator, data, ranks, "dataset_val", num_to_run)
    if loader.max_tokens:
        val_loader.propose_tokens = lambda: loader.max_tokens
    return loader, val_loader
