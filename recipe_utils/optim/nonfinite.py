"""Leaves update steps out whose gradient is not finite, before they reach the weights.

The gradient norm is one number that all ranks share, and a loss that is NaN or infinite makes it so, too. So
every rank decides for itself, and alike.
"""

import logging

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchtune.utils import get_logger, log_rank_zero

from recipe_utils.data.loader.to_host import ToHost
from recipe_utils.optim.optimizer import OnNonfinite, OptimizerInBackward

_log = get_logger("INFO")


class NonfiniteError(RuntimeError):
    """The gradient was not finite; the weights are those from before."""


class NonfiniteGuard:
    """Says whether an update step may reach the weights, and counts those that may not.

    Fused optimizers leave a step out on the device, by the ``found_inf`` that PyTorch's gradient scaler
    hands them, and the host does not wait. For others it must read one number per update step.

    Args:
        optimizer: that is about to step; one that steps in the backward is not looked at.
        device: of the gradient norms.
        on_nonfinite: ``stop`` at the first, or ``skip`` them.
        max_in_a_row: of steps that ``skip`` may leave out.
    """

    def __init__(
        self,
        optimizer: Optimizer | OptimizerInBackward,
        device: torch.device,
        on_nonfinite: OnNonfinite = "stop",
        max_in_a_row: int = 10,
    ) -> None:
        self._optimizer = optimizer
        self._on_nonfinite = on_nonfinite
        self._max_in_a_row = max_in_a_row
        self._is_fused = all(group.get("fused") for group in optimizer.param_groups)
        self._num_left_out = torch.zeros((), dtype=torch.int64, device=device)
        self._num_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._most_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._num_seen = 0
        self._last_read = (0, 0)
        self._text = ""
        self._unread: list[_LeftOut] = []

    def admits(self, grad_norm: Tensor | None) -> bool:
        """Whether to step: not where ``grad_norm`` [] is NaN or infinite.

        With a fused optimizer always True: its next step leaves itself out on the device. So it is
        for None, with an optimizer that has stepped in the backward.
        """
        if grad_norm is None:
            return True
        self._num_seen += 1
        is_nonfinite = ~torch.isfinite(grad_norm)
        self._num_left_out += is_nonfinite
        self._num_in_a_row = (self._num_in_a_row + 1) * is_nonfinite
        self._most_in_a_row = torch.maximum(self._most_in_a_row, self._num_in_a_row)
        if self._is_fused:
            self._optimizer.found_inf = is_nonfinite.float()  # type: ignore[union-attr]
            return True
        return not is_nonfinite

    def read_and_restart(self, global_step: int) -> "_LeftOut":
        """How many were left out since the last time, up to ``global_step``, to be read later.

        Those in a row at the end count on. Once it is read, a warning says so, unless the training should stop.
        """
        left_out = self._left_out(global_step)
        self._num_left_out.zero_()
        self._most_in_a_row = self._num_in_a_row.clone()
        self._num_seen = 0
        self._unread.append(left_out)
        return left_out

    def look(self, global_step: int, waits: bool = True) -> bool:
        """Whether what was left out ends the training.

        Args:
            global_step: of the update step that was done last.
            waits: for the device, so that all steps up to this one are known; otherwise those are that have
                been read already. Goes on counting.
        """
        if waits:
            for left_out in [*self._unread]:
                left_out.read()
            if self._num_seen:
                self._take(self._left_out(global_step))
        return self.should_stop

    @property
    def should_stop(self) -> bool:
        """Whether what was read last ends the training."""
        num_left_out, in_a_row = self._last_read
        if num_left_out == 0:
            return False
        return self._on_nonfinite == "stop" or in_a_row > self._max_in_a_row

    warning = ""
    """Of copied recipes, which say it: it is said when it is read."""

    @property
    def description(self) -> str:
        """What was read last, in words; empty if nothing was left out."""
        num_left_out, in_a_row = self._last_read
        if num_left_out == 0:
            return ""
        if not self.should_stop:
            return f"{self._text} (on_nonfinite=skip)"
        return (
            f"{self._text}. on_nonfinite={self._on_nonfinite}: {in_a_row} in a row, "
            f"max_nonfinite_steps={self._max_in_a_row}. resume_from_checkpoint=True goes on from here; "
            "set a lower learning rate, or on_nonfinite=skip and a higher max_nonfinite_steps"
        )

    def _left_out(self, global_step: int) -> "_LeftOut":
        counts = torch.stack([self._num_left_out, self._most_in_a_row])
        return _LeftOut(self, counts, self._num_seen, global_step)

    def _take(self, left_out: "_LeftOut") -> None:
        """What is known now; why the training should stop stays what it was."""
        if not self.should_stop:
            self._last_read = left_out.counts()
            self._text = (
                f"{self._last_read[0]} of the last {left_out.num_seen} update steps up to "
                f"{left_out.global_step} had a loss or gradient that is not finite; they were left out, the "
                "weights are untouched"
            )

    def _take_unread(self, left_out: "_LeftOut") -> None:
        self._take(left_out)
        self._unread.remove(left_out)
        if self.description and not self.should_stop:
            log_rank_zero(_log, self.description, level=logging.WARNING)


class _LeftOut:
    """How many of some update steps were left out; the guard knows once it is read."""

    def __init__(
        self, guard: NonfiniteGuard, counts: Tensor, num_seen: int, global_step: int
    ) -> None:
        self.num_seen = num_seen
        self.global_step = global_step  # of the last of them
        self._guard = guard
        self._counts = ToHost(counts)
        self._is_read = False

    def counts(self) -> tuple[int, int]:
        """Of those left out, and of the most in a row. Waits for the device."""
        num_left_out, in_a_row = self._counts.read().tolist()
        return num_left_out, in_a_row

    def read(self) -> int:
        """See :class:`recipe_utils.data.loader.to_host.Late`."""
        if not self._is_read:
            self._is_read = True
            self._guard._take_unread(self)
        return self.counts()[0]
