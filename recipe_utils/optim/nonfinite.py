"""Skips optimizer steps with NaN or infinite gradients, and with spikes of the gradient norm.

All ranks have the same gradient norm, which also shows a NaN or infinite loss, so they decide alike.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from recipe_utils.optim.optimizer import OptimizerInBackward, OptimizerSettings, inner_optimizers


class NonfiniteError(RuntimeError):
    """Gradients, or outputs of a frozen model, were not finite; they have not changed the weights."""


_NUM_NORMS, _MIN_NORMS = 100, 10
"""Gradient norms of the median that spikes are compared with."""


class NonfiniteGuard:
    """Keeps non-finite gradients from the weights, and counts the update steps that are skipped.

    Fused optimizers skip a step on the device, by the ``found_inf`` that PyTorch's gradient scaler
    sets. For other optimizers the host reads one number per update step. An optimizer that steps in
    the backward is not guarded. ``device`` is that of the gradient norms. With ``on_spike``, spikes are
    treated alike: norms far above the median of the last ones, which include spikes.
    """

    def __init__(
        self,
        optimizer: Optimizer | OptimizerInBackward,
        device: torch.device,
        settings: OptimizerSettings,
    ) -> None:
        self.problem = ""
        """Reason why training must stop; empty if it need not."""
        self._optimizer = optimizer
        self._settings = settings
        # Inner optimizers would not see found_inf.
        has_inner = bool(inner_optimizers(optimizer))
        self._is_fused = not has_inner and all(g.get("fused") for g in optimizer.param_groups)
        self._num_steps = 0
        self._norms = torch.full((_NUM_NORMS,), torch.nan, dtype=torch.float64, device=device)
        self._num_norms = 0
        self._spikes = torch.zeros(4, dtype=torch.float64, device=device)
        self.highest_losses: Callable[[int], str] = lambda _: ""
        """Function that returns the highest losses of samples of an update step, by its number."""
        self._num_skipped, self._num_in_a_row, self._most_in_a_row = torch.zeros(
            3, dtype=torch.int64, device=device
        )

    def should_step(self, grad_norm: Tensor | None) -> bool:
        """Returns False if ``grad_norm`` [] is NaN or infinite.

        Always True with a fused optimizer, whose next step is then a no-op, and for None (an
        optimizer that steps in the backward).
        """
        if grad_norm is None:
            return True
        is_nonfinite = ~torch.isfinite(grad_norm)
        self._num_steps += 1
        self._num_skipped += is_nonfinite
        self._num_in_a_row = (self._num_in_a_row + 1) * is_nonfinite
        self._most_in_a_row = torch.maximum(self._most_in_a_row, self._num_in_a_row)
        is_bad = is_nonfinite
        if self._settings.on_spike is not None:
            is_bad = is_nonfinite | self._is_spike(grad_norm.detach().double(), is_nonfinite)
        if self._is_fused:
            self._optimizer.found_inf = is_bad.float()  # type: ignore[union-attr]
            return True
        return not is_bad

    # ---- Spikes ---------------------------------------------------------------------------------

    def _is_spike(self, norm: Tensor, is_nonfinite: Tensor) -> Tensor:
        """Returns True [] for a spike, without a device synchronization; adds the norm [] to the last ones."""
        median = self._norms.nanmedian()
        is_above = ~is_nonfinite & (norm > self._settings.spike_factor * median)
        is_spike = is_above & (self._norms.isfinite().sum() >= _MIN_NORMS)
        at = torch.full_like(median, self._num_steps)
        spike = torch.stack([self._spikes[0] + 1, at, norm.to(median.device), median])
        self._spikes = torch.where(is_spike, spike, self._spikes)
        self._norms[self._num_norms % _NUM_NORMS] = norm.masked_fill(is_nonfinite, torch.nan)
        self._num_norms += 1
        return is_spike

    def norms(self) -> list[float | None]:
        """Returns the last norms for a checkpoint, None if not finite; empty without ``on_spike``."""
        ordered = self._norms.roll(-self._num_norms)[-min(self._num_norms, _NUM_NORMS) :]
        found = ordered.tolist() if self._num_norms else []
        return [norm if norm == norm else None for norm in found]

    def restore_norms(self, norms: Sequence[float | None]) -> None:
        """Continues with the norms of a checkpoint."""
        for norm in norms:
            self._norms[self._num_norms % _NUM_NORMS] = torch.nan if norm is None else norm
            self._num_norms += 1

    def take_spikes(self) -> Tensor:
        """Returns the spikes since the last call, [4]; call it before :meth:`take_counts`.

        Number of spikes; of the last one, the number of update steps up to it, the norm and the median.
        """
        spikes, self._spikes = self._spikes, torch.zeros_like(self._spikes)
        return spikes

    def judge_spikes(self, spikes: Sequence[float], num_steps: int, global_step: int) -> str:
        """Sets :attr:`problem` with ``on_spike: stop``, otherwise returns a warning; "" without spikes."""
        number, at, norm, median = spikes
        if not number or self.problem:
            return ""
        step, on_spike = global_step - num_steps + int(at), self._settings.on_spike
        losses = self.highest_losses(step)
        text = (
            f"update step {step} had a gradient norm of {norm:.3g}, the median of the last is "
            f"{median:.3g}; skipped, the weights are unchanged{losses and f'; highest losses: {losses}'}"
        )
        if number > 1:
            text += f"; so were {int(number) - 1} others of the last {num_steps}"
        if on_spike == "skip":
            return f"{text} ({on_spike=!s})"
        self.problem = (
            f"{text}. {on_spike=!s}: resume_from_checkpoint=True resumes from here; look at the "
            "samples, or set a higher spike_factor or on_spike=skip"
        )
        return ""

    def take_counts(self) -> tuple[Tensor, int]:
        """Returns skipped steps and most in a row [2], and all steps, since the last call."""
        counts = torch.stack([self._num_skipped, self._most_in_a_row]), self._num_steps
        self._num_skipped = torch.zeros_like(self._num_skipped)
        self._most_in_a_row = self._num_in_a_row.clone()  # a series continues after the call
        self._num_steps = 0
        return counts

    def judge(self, num_skipped: int, most_in_a_row: int, num_steps: int, global_step: int) -> str:
        """Sets :attr:`problem` if the counts end the training; otherwise returns a warning."""
        if num_skipped == 0 or self.problem:
            return ""
        on_nonfinite = self._settings.on_nonfinite
        max_nonfinite_steps = self._settings.max_nonfinite_steps
        of_steps = f"{num_skipped} of the last {num_steps} update steps up to {global_step}"
        text = (
            f"{f'update step {global_step}' if num_steps == 1 else of_steps} had a loss or gradient that is "
            "not finite; skipped, the weights are unchanged"
        )
        if on_nonfinite == "skip" and most_in_a_row <= max_nonfinite_steps:
            return f"{text} (on_nonfinite=skip)"
        if num_skipped == global_step:  # no step has ever changed the weights
            self.problem = (
                f"no loss or gradient was finite up to update step {global_step}, and the weights are "
                "unchanged; look at the weights of checkpointer, the data and the scale of the loss"
            )
            return ""
        self.problem = (
            f"{text}. {on_nonfinite=!s}: {most_in_a_row} in a row, {max_nonfinite_steps=}. "
            f"resume_from_checkpoint=True resumes from here; set a lower learning rate, or "
            "on_nonfinite=skip and a higher max_nonfinite_steps"
        )
        return ""

    def check(self, global_step: int) -> None:
        """Judges the steps since :meth:`take_counts`. Synchronizes with the device."""
        if self._settings.on_spike is not None:
            self.judge_spikes(self._spikes.tolist(), self._num_steps, global_step)
        num_skipped, most_in_a_row = int(self._num_skipped), int(self._most_in_a_row)
        self.judge(num_skipped, most_in_a_row, self._num_steps, global_step)
