"""Exports within an epoch: a part of a training. Those at the end of epochs belong to the run."""

from recipe_utils.training.parts.protocol import Part
from recipe_utils.training.run import Run
from recipe_utils.update_steps.step import UpdateStep


class Exports(Part):
    """Exports of the model as ``export_step_N``."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def after(self, step: UpdateStep) -> dict[str, float]:
        """Exports the model, except at the end of an epoch and at a stop, which has no time for it."""
        if not (step.is_last_of_epoch or self._run.stop.is_agreed):
            self._run.export(f"export_step_{self._run.global_step}")
        return {}
