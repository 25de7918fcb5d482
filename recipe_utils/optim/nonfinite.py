"""Leaves update steps out whose gradient is not finite, before they reach the weights.

The gradient norm is one number that all ranks share, and a loss that is NaN or infinite makes it so, too. So
every rank decides for itself, and alike.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer


class NonfiniteError(RuntimeError):
    """The gradient was not finite; the weights are those from before."""


class FiniteSteps:
    """Steps an optimizer where the gradient is finite, and counts where it is not.

    Fused optimizers skip the step on the device, by the ``found_inf`` that PyTorch's gradient scaler hands
    them, and the host does not wait. For others it must read one number per update step.

    Args:
        optimizer: what to step.
        device: of the gradient norms.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._is_fused = all(group.get("fused") for group in optimizer.param_groups)
        self._num_left_out = torch.zeros((), dtype=torch.int64, device=device)
        self._num_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._most_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def step(self, grad_norm: Tensor) -> None:
        """Steps, unless ``grad_norm`` [] is NaN or infinite; then weights and state stay as they are."""
        is_nonfinite = ~torch.isfinite(grad_norm)
        self._num_left_out += is_nonfinite
        self._num_in_a_row = (self._num_in_a_row + 1) * is_nonfinite
        self._most_in_a_row = torch.maximum(self._most_in_a_row, self._num_in_a_row)
        if self._is_fused:
            self._optimizer.found_inf = is_nonfinite.float()  # type: ignore[attr-defined]
            self._optimizer.step()
        elif not is_nonfinite:
            self._optimizer.step()

    def read_and_restart(self) -> tuple[int, int]:
        """How many were left out since the last time, and the most in a row. Waits for the device.

        Those in a row at the end count on.
        """
        num_left_out, most = int(self._num_left_out), int(self._most_in_a_row)
        self._num_left_out.zero_()
        self._most_in_a_row = self._num_in_a_row.clone()
        return num_left_out, most
