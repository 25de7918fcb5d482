"""Speed of a training: figures of the update steps since the last log line, and the profiler."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.run.settings import PROFILER

_RATES = {
    "target_tokens": "tokens_per_second_per_gpu",
    "real_tokens": "real_tokens_per_second_per_gpu",
    "images": "images_per_second_per_gpu",
    "crop_tokens": "crop_tokens_per_second_per_gpu",
}


class Throughput:
    """Counts tokens and seconds by the host's clock. Never waits for a device.

    Args:
        world_size: ranks that rates are divided by, those with the same data included.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.restart()

    def restart(self) -> None:
        """Starts a new window. Call it after work other than training, such as validation."""
        self._began = time.perf_counter()
        self._num_steps = 0
        self._totals: Counter[str] = Counter()
        self._wait_seconds = 0.0

    def add(self, step: UpdateStep, wait_seconds: float) -> None:
        """Adds an update step and how long the loop waited for it."""
        self._num_steps += 1
        self._totals.update(step.totals)
        self._wait_seconds += wait_seconds

    def read_and_restart(self) -> dict[str, float]:
        """Returns the window's figures, those whose counts the update steps have.

        ``tokens_per_second_per_gpu``: target tokens over all DP ranks / (seconds * world size); ``real_tokens``: all
        tokens but padding; ``images``: each once, however many crops it has; ``crop_tokens``: tokens of the student.
        ``padding_fraction``: padding / positions. ``shared_fraction``: tokens computed once instead of twice / all
        tokens but padding. ``data_wait_seconds``: mean per update step on this rank.
        """
        totals, seconds = self._totals, max(time.perf_counter() - self._began, 1e-9)
        figures = {"data_wait_seconds": self._wait_seconds / max(self._num_steps, 1)}
        for name, figure in _RATES.items():
            if name in totals:
                figures[figure] = totals[name] / self._world_size / seconds
        if "positions" in totals:
            num_computed = totals["real_tokens"] - totals["shared_tokens"]
            figures["padding_fraction"] = 1 - num_computed / max(totals["positions"], 1)
        if "shared_tokens" in totals:
            figures["shared_fraction"] = totals["shared_tokens"] / max(totals["real_tokens"], 1)
        self.restart()
        return figures


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


def build_profiler(cfg: Mapping[str, Any] | None, ranks: Ranks) -> UpdateStepProfiler:
    """Builds torchtune's profiler, disabled if ``cfg`` is None."""
    component = OmegaConf.create({"_component_": PROFILER, **(cfg or {"enabled": False})})
    profiler, settings = config.instantiate(component)
    records = ranks.is_zero and ranks.device.type == "cuda"
    return UpdateStepProfiler(profiler, settings, record_memory_history=records)
