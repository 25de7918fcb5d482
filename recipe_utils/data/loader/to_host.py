"""Brings numbers back from the device, which goes on meanwhile, and so does the host."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Late(Protocol):
    """A number that the device may not have computed yet."""

    def read(self) -> float | None:
        """Waits for it; the same again when asked again. None if there turns out to be none."""


class ToHost:
    """A copy of a tensor on its way to the host.

    From CUDA it goes into pinned memory and nobody waits for it; other devices are waited for here.

    Args:
        numbers: of any shape and device; may change afterwards.
    """

    def __init__(self, numbers: Tensor) -> None:
        numbers = numbers.detach()
        # PyTorch pins what it copies from CUDA this way.
        self._numbers = numbers.to("cpu", non_blocking=numbers.is_cuda, copy=True)
        self._has_arrived = (
            torch.cuda.current_stream(numbers.device).record_event() if numbers.is_cuda else None
        )

    def read(self) -> Tensor:
        """The numbers, on the CPU. Waits until the device has computed them, not for what it got to do since."""
        if self._has_arrived is not None:
            self._has_arrived.synchronize()
        return self._numbers


class LateNumber:
    """A tensor's only number.

    Args:
        number: of one element.
    """

    def __init__(self, number: Tensor) -> None:
        self._number = ToHost(number)

    def read(self) -> float:
        """See :class:`Late`."""
        return self._number.read().item()
