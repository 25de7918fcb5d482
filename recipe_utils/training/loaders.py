"""Builders of loaders, and update steps that nothing can be trained on."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from omegaconf import DictConfig
from torchtune.utils import get_logger, log_rank_zero

from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.losses.dataset_weights import LossWeightSettings
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import build
from recipe_utils.text.mixture import Mixture
from recipe_utils.text.trees import makes_trees
from recipe_utils.training.log import Log
from recipe_utils.update_steps.loader import UpdateStep, UpdateStepLoader
from recipe_utils.update_steps.samples import SampleError

_MOST_BAD_STEPS = 3
"""Update steps in a row without a good sample that end a run."""


def validates_dataset(settings: Any) -> bool:
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
    cfg: DictConfig, load: Callable[..., Any], collator: Any, settings: Any, ranks: Ranks, loss_fn: Any = None
) -> tuple[UpdateStepLoader, UpdateStepLoader | None]:
    """Builds the loaders of ``dataset`` and, if training validates, of ``dataset_val``.

    ``load`` builds a dataset, as :func:`.load_dataset`. With a ``loss_fn`` that sums named datasets
    their targets have weights, 1 in validation. Raises ConfigError for problems of both datasets.
    """
    validates = validates_dataset(settings)
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


class SkippedSteps:
    """Update steps whose total of ``counted`` is 0, which a run skips on all ranks.

    With ``on_bad_sample: skip``, update steps 5, 6 and 7 of bad samples alone are two warnings and an error.
    """

    def __init__(self, loader: UpdateStepLoader, counted: str, log: Log) -> None:
        self._loader, self._counted, self._log = loader, counted, log
        self.num_bad_in_a_row = 0

    def add(self, step: UpdateStep, epoch: int) -> None:
        """Warns of a skipped update step. Raises SampleError at the third in a row without a good sample."""
        self._log.warn(
            f"epoch {epoch + 1}, update step {step.index + 1}: it has no {self._counted.replace('_', ' ')}; skipped, "
            "weights and schedule are unchanged"
        )
        num_samples = len(self._loader.order.samples(epoch, step.index))
        self.num_bad_in_a_row = self.num_bad_in_a_row + 1 if step.num_skipped == num_samples else 0
        if self.num_bad_in_a_row == _MOST_BAD_STEPS:
            raise SampleError(
                f"on_bad_sample=skip: all {num_samples} samples of each of the last {_MOST_BAD_STEPS} update steps "
                "were bad, see the warnings above; correct dataset, or the tokenizer and transform that read it"
            )

    def check(self, state: TrainingState) -> None:
        """Raises SampleError at the end of an epoch if nothing was trained yet."""
        if state.global_step == 0:
            raise SampleError(
                f"no update step of epoch {state.epoch + 1} had {self._counted.replace('_', ' ')}: nothing was trained, "
                "and nothing is exported; look at the samples that are skipped (on_bad_sample=raise ends at the first)"
            )
