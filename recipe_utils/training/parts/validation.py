"""Validation: a part of a training, and sums of an objective over a validation dataset."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recipe_utils.models.frozen import Attached
from recipe_utils.models.pipeline.microbatches import Pipeline
from recipe_utils.parallel.to_device import to_device_ahead
from recipe_utils.training.parts.protocol import Part
from recipe_utils.training.run import Run
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.step import Microbatch, UpdateStep


class Validation(Part):
    """Validation metrics of a training. Exports the model at each new lowest ``val_loss``, if configured.

    ``validate`` returns metrics [] by name, equal on all ranks.
    """

    def __init__(self, run: Run, validate: Callable[[], Mapping[str, Tensor]]) -> None:
        self._run, self._validate = run, validate
        self._best_val_loss: float | None = None

    def after(self, step: UpdateStep) -> Mapping[str, float]:
        """Returns the metrics."""
        run, best = self._run, self._best_val_loss
        with run.parts.weights():
            values = {name: value.item() for name, value in self._validate().items()}
        if run.global_step == 0:
            listed = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
            run.log.info(f"Before the first update step: {listed}")
            return values
        val_loss = values.get("val_loss", math.nan)
        if math.isfinite(val_loss) and (best is None or val_loss < best):
            self._best_val_loss = val_loss
            if run.settings.keep_best_checkpoint:
                run.export("best")
        return values

    def state(self) -> dict[str, Any]:
        """Returns the lowest ``val_loss`` so far."""
        return {} if self._best_val_loss is None else {"best_val_loss": self._best_val_loss}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes the lowest ``val_loss`` so far."""
        self._best_val_loss = state.get("best_val_loss")


@torch.no_grad()
def sum_over(
    loader: UpdateStepLoader,
    model: nn.Module,
    sums: Callable[[Microbatch], Tensor],
    num_sums: int,
    pipeline: Pipeline | None,
    device: torch.device,
    attached: Attached,
) -> tuple[Tensor, Counter[str]]:
    """Returns this rank's sums over a loader in fp64, and its totals over all ranks.

    ``sums`` maps a microbatch to its ``num_sums`` sums; with a ``pipeline`` they are those of its last stage.
    ``attached`` is the recipe's.
    """
    # Without dropout; the recipe continues in training mode.
    model.eval()
    of_all = torch.zeros(num_sums, dtype=torch.float64, device=device)
    totals: Counter[str] = Counter()
    with loader.epoch(0) as steps:
        for step in steps:
            with attached(step) as microbatches:
                if pipeline is not None:
                    of_all += pipeline.forward(microbatches)
                else:
                    for microbatch in to_device_ahead(microbatches, device):
                        of_all += sums(microbatch)
            totals.update(step.totals)
    model.train()
    return of_all, totals
