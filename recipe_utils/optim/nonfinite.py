"""Skips optimizer steps with NaN or infinite gradients, and those that a recipe skips by a condition of its own.

All ranks have the same gradient norm, which also shows a NaN or infinite loss, so they decide alike.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from recipe_utils.cli.advice import how_to_resume
from recipe_utils.optim.optimizer import OptimizerInBackward, OptimizerSettings, inner_optimizers


class NonfiniteError(RuntimeError):
    """Gradients, or outputs of a frozen model, were not finite; they have not changed the weights."""


class NonfiniteGuard:
    """Keeps non-finite gradients from the weights, and counts the update steps that are skipped.

    Fused optimizers skip a step on the device, by the ``found_inf`` that PyTorch's gradient scaler
    sets. For other optimizers the host reads one number per update step. An optimizer that steps in
    the backward is not guarded. ``device`` is that of the gradient norms.
    """

    def __init__(
        self, optimizer: Optimizer | OptimizerInBackward, device: torch.device, settings: OptimizerSettings
    ) -> None:
        self.problem = ""
        """Reason why training must stop; empty if it need not."""
        self._optimizer = optimizer
        self._settings = settings
        # Inner optimizers would not see found_inf.
        has_inner = bool(inner_optimizers(optimizer))
        self._is_fused = not has_inner and all(g.get("fused") for g in optimizer.param_groups)
        self._num_steps = 0
        zeros = torch.zeros(4, dtype=torch.int64, device=device)
        self._num_nonfinite, self._num_in_a_row, self._most_in_a_row, self._num_own = zeros

    def should_step(self, grad_norm: Tensor | None, also: Tensor | bool = True) -> bool:
        """Returns False if ``grad_norm`` [] is NaN or infinite, or unless ``also``, a condition of the recipe's own.

        ``also`` [] is the same on all ranks and on the device of ``grad_norm``. Update steps that it skips are counted
        by themselves; they never end a training.

        Always True with a fused optimizer, whose next step is then a no-op, and for None (an
        optimizer that steps in the backward, which refuses ``also``).
        """
        if grad_norm is None:
            if also is not True:
                raise ValueError("optimizer_in_bwd=True: the backward has updated the weights; set it to False to skip")
            return True
        # Counted on the device, so that the host does not wait here; it reads the counts with the metrics.
        is_nonfinite = ~torch.isfinite(grad_norm)
        is_skipped = is_nonfinite | (~also if isinstance(also, Tensor) else not also)
        self._num_own += is_skipped & ~is_nonfinite
        self._num_steps += 1
        self._num_nonfinite += is_nonfinite
        self._num_in_a_row = (self._num_in_a_row + 1) * is_nonfinite
        self._most_in_a_row = torch.maximum(self._most_in_a_row, self._num_in_a_row)
        # found_inf is that of PyTorch's GradScaler: the kernel itself skips the update.
        if self._is_fused:
            self._optimizer.found_inf = is_skipped.float()  # type: ignore[union-attr]
            return True
        return not is_skipped

    def take_counts(self) -> tuple[Tensor, int]:
        """Returns non-finite steps, most in a row and own skips [3], and all steps, since the last call."""
        counts = torch.stack([self._num_nonfinite, self._most_in_a_row, self._num_own]), self._num_steps
        self._num_nonfinite, self._num_own = torch.zeros_like(counts[0][:2])
        self._most_in_a_row = self._num_in_a_row.clone()  # a series continues after the call
        self._num_steps = 0
        return counts

    def judge(self, num_nonfinite: int, most_in_a_row: int, num_steps: int, global_step: int) -> str:
        """Sets :attr:`problem` if the counts end the training; otherwise returns a warning."""
        if num_nonfinite == 0 or self.problem:
            return ""
        on_nonfinite, max_nonfinite_steps = self._settings.on_nonfinite, self._settings.max_nonfinite_steps
        which = f"{num_nonfinite} of the last {num_steps} update steps up to {global_step}"
        which = f"update step {global_step}" if num_steps == 1 else which
        text = f"{which} had a loss or gradient that is not finite; skipped, the weights are unchanged"
        if on_nonfinite == "skip" and most_in_a_row <= max_nonfinite_steps:
            return f"{text} (on_nonfinite=skip)"
        if num_nonfinite == global_step:  # no step has ever changed the weights
            self.problem = (
                f"no loss or gradient was finite up to update step {global_step}, and the weights are "
                "unchanged; look at the weights of checkpointer, the data and the scale of the loss"
            )
            return ""
        self.problem = (
            f"{text}. {on_nonfinite=!s}: {most_in_a_row} in a row, {max_nonfinite_steps=}. "
            f"{how_to_resume('here', resumes=False)}; set a lower learning rate, or on_nonfinite=skip and a higher "
            "max_nonfinite_steps"
        )
        return ""

    def check(self, global_step: int) -> None:
        """Judges the steps since :meth:`take_counts`. Synchronizes with the device."""
        num_nonfinite, most_in_a_row = int(self._num_nonfinite), int(self._most_in_a_row)
        self.judge(num_nonfinite, most_in_a_row, self._num_steps, global_step)
