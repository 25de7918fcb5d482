"""Validation: a part of a training, and sums of an objective over a validation dataset.

With ``early_stopping_patience: 2`` and validations of 5.0, 4.0, 4.2 and 4.1, the second one is the best, and the training
ends after the fourth one.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from recipe_utils.models.frozen import Attached
from recipe_utils.models.runner import Runner
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.training.log import best_of
from recipe_utils.training.parts.protocol import Part
from recipe_utils.training.parts.sample_losses import DatasetLosses
from recipe_utils.training.run import Run
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.step import UpdateStep


class Validation(Part):
    """Validation metrics of a training. Exports the best model and ends the training early, if configured.

    ``validate`` returns metrics [] by name, equal on all ranks; ``by_dataset`` adds the losses of named datasets. The best model is that of the first metric in
    :attr:`.Reported.validation`.
    """

    def __init__(
        self,
        run: Run,
        validate: Callable[[], Mapping[str, Tensor | float]],
        by_dataset: DatasetLosses | None = None,
    ) -> None:
        self._run, self._validate, self._by_dataset = run, validate, by_dataset
        self._state: dict[str, float] = {}

    def after(self, step: UpdateStep) -> Mapping[str, float]:
        """Returns the metrics."""
        run = self._run
        with run.parts.weights():
            values = {name: float(value) for name, value in self._measured().items()}
        best_by = next(filter(values.__contains__, run.metrics.reported.validation), None)
        if run.global_step == 0:
            listed = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
            run.log.info(f"Before the first update step: {listed}")
        elif best_by is not None:
            # One rank decides for all, which export and end together.
            self._compare(best_by, gather_objects(values[best_by], run.ranks.cpu_group)[0])
        return values

    def _measured(self) -> dict[str, Tensor | float]:
        """Returns the recipe's metrics, and the mean loss of each named dataset."""
        if self._by_dataset is None:
            return {**self._validate()}
        self._by_dataset.start(validates=True)
        return {**self._validate(), **self._by_dataset.means()}

    def _compare(self, name: str, value: float) -> None:
        """Compares a validation with the best one before."""
        settings, best = self._run.settings, self._state.get(f"best_{name}")
        is_best = math.isfinite(value) and (best is None or best_of(name)((value, best)) != best)
        is_enough = is_best and (best is None or abs(value - best) > settings.early_stopping_threshold)
        self._state["num_since_best"] = 0 if is_enough else self._state.get("num_since_best", 0) + 1
        if is_best:
            self._state[f"best_{name}"] = value
            if settings.keep_best_checkpoint:
                self._run.export("best")
        self._run.ends_early = self._is_over()

    def _is_over(self) -> bool:
        return self._state.get("num_since_best", 0) >= (self._run.settings.early_stopping_patience or math.inf)

    def state(self) -> dict[str, Any]:
        """Returns the best validation so far, and the number of validations since."""
        return self._state

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes the values of :meth:`state`."""
        self._state = dict(state)
        self._run.ends_early = self._is_over()

    def summary(self) -> Iterator[str]:
        """Yields why the training ended early."""
        if self._run.ends_early:
            patience = self._run.settings.early_stopping_patience
            yield f"Ended early: {patience} validations in a row were not better (early_stopping_patience={patience})"


@torch.no_grad()
def sum_over(loader: UpdateStepLoader | None, model: Runner, attached: Attached) -> tuple[Tensor, Counter[str]]:
    """Returns this rank's sums [k] of a model over a loader in fp64, and its totals over all ranks.

    ``loader`` is that of ``dataset_val``, and ``attached`` the recipe's.
    """
    assert loader is not None, "run_val_every_n_steps needs dataset_val, which the settings have checked"
    # Without dropout; the recipe continues in training mode.
    model.module.eval()
    of_all = torch.zeros(model.num_sums, dtype=torch.float64, device=model.device)
    totals: Counter[str] = Counter()
    with loader.epoch(0) as steps:
        for step in steps:
            with attached(step) as microbatches:
                of_all += model.forward(microbatches)
            totals.update(step.totals)
    model.module.train()
    return of_all, totals
