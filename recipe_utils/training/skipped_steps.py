"""Update steps without anything to train on."""

from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.training.log import Log
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.samples import SampleError
from recipe_utils.update_steps.step import UpdateStep

_MOST_BAD_STEPS = 3
"""Update steps in a row without a good sample that end a run."""


class SkippedSteps:
    """Update steps whose total ``divisor`` is 0, which a run skips on all ranks.

    With ``on_bad_sample: skip``, update steps 5, 6 and 7 of bad samples alone are two warnings and an error.
    """

    def __init__(self, loader: UpdateStepLoader, divisor: str, log: Log) -> None:
        self._loader, self._nouns, self.logger = loader, f"{loader.dataset.noun}s", log
        self._data = "target tokens" if divisor == "weights" else divisor.replace("_", " ")
        self.num_bad_in_a_row = 0

    def add(self, step: UpdateStep, epoch: int) -> None:
        """Warns of a skipped update step. Raises SampleError at the third in a row without a good sample."""
        self.logger.warn(
            f"epoch {epoch + 1}, update step {step.index + 1}: it has no {self._data}; skipped, "
            "weights and schedule are unchanged"
        )
        num_samples = len(self._loader.order.samples(epoch, step.index))
        self.num_bad_in_a_row = self.num_bad_in_a_row + 1 if step.totals["skipped_samples"] == num_samples else 0
        if self.num_bad_in_a_row == _MOST_BAD_STEPS:
            raise SampleError(
                f"on_bad_sample=skip: all {num_samples} {self._nouns} of each of the last {_MOST_BAD_STEPS} update steps "
                "were bad, see the warnings above; correct dataset, or the tokenizer and transform that read it"
            )

    def check(self, state: TrainingState) -> None:
        """Raises SampleError at the end of an epoch if nothing was trained yet."""
        if state.global_step == 0:
            raise SampleError(
                f"no update step of epoch {state.epoch + 1} had {self._data}: nothing was trained, "
                f"and nothing is exported; look at the {self._nouns} that are skipped (on_bad_sample=raise ends at the first)"
            )
