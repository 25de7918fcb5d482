"""Measurement of an update step's memory and time on its device."""

from collections.abc import Callable
from typing import Protocol

import torch

from recipe_utils.memory.budget import Measured

_LIMIT = 0.92
"""Share of the memory that an update step may take; the rest is for fragmentation."""


class Meter(Protocol):
    """Meter of update steps."""

    total_bytes: int
    """Memory of the device."""

    def start(self) -> None:
        """Starts an update step, before its first forward."""

    def stop(self) -> tuple[Measured, Callable[[], float]]:
        """Returns the memory of an enqueued update step, and a function that waits for its seconds."""


class CudaMeter:
    """Meter of a CUDA device, which counts active bytes on the host when work is enqueued.

    Reserved bytes include blocks of earlier shapes; allocated bytes exclude blocks that another stream
    still uses. The limit excludes memory of other processes and libraries.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = torch.cuda.get_device_properties(device).total_memory

    def start(self) -> None:
        """Starts an update step."""
        torch.cuda.reset_peak_memory_stats(self._device)
        stats = torch.cuda.memory_stats(self._device)
        self._before = stats["active_bytes.all.current"]
        self._num_retries = stats["num_alloc_retries"]
        self._began = torch.cuda.current_stream(self._device).record_event(_event())

    def stop(self) -> tuple[Measured, Callable[[], float]]:
        """Returns the memory of an enqueued update step, and a function that waits for its seconds."""
        began, ended = self._began, torch.cuda.current_stream(self._device).record_event(_event())

        def seconds() -> float:
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1000

        stats = torch.cuda.memory_stats(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        limit = int(_LIMIT * (free + stats["reserved_bytes.all.current"]))
        has_retried = stats["num_alloc_retries"] > self._num_retries
        return Measured(self._before, stats["active_bytes.all.peak"], limit, has_retried), seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


METERS: dict[str, Callable[[torch.device], Meter]] = {"cuda": CudaMeter}
"""Meters by the type of the device."""
