"""A profiler that steps once per update step, with CUDA's memory history over the same window."""

from typing import Any

import torch
from omegaconf import DictConfig


class UpdateStepProfiler:
    """torch.profiler with the wait / warm-up / active schedule counted in update steps.

    Args:
        profiler: has ``start``, ``step`` and ``stop``.
        settings: what ``torchtune.training.setup_torch_profiler`` returned beside the profiler.
        record_memory_history: record CUDA's allocations during the first cycle's active steps.
    """

    def __init__(self, profiler: Any, settings: DictConfig, record_memory_history: bool) -> None:
        self._profiler = profiler
        self._num_steps = 0
        self._history = range(0)
        if settings["enabled"] and settings.get("profile_memory") and record_memory_history:
            first = settings["wait_steps"] + settings["warmup_steps"]
            self._history = range(first, first + settings["active_steps"])

    def start(self) -> None:
        """Call before the first update step."""
        self._profiler.start()
        self._switch_memory_history()

    def step(self) -> None:
        """Call at the end of every update step."""
        self._num_steps += 1
        self._profiler.step()  # dumps the trace and the memory snapshot after the last active step
        self._switch_memory_history()

    def stop(self) -> None:
        """Call after the last update step."""
        self._profiler.stop()

    def _switch_memory_history(self) -> None:
        if not self._history:
            return
        if self._num_steps == self._history.start:
            torch.cuda.memory._record_memory_history()
        elif self._num_steps == self._history.stop:
            torch.cuda.memory._record_memory_history(enabled=None)
