"""Figures of the update steps since the last log line."""

import time
from collections import Counter
from typing import NamedTuple

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.data.loader.to_host import Late


class Throughput:
    """Counts tokens and seconds from the start of one update step to the start of another.

    Reads the host's clock and counts that are on the CPU already, so it never waits for a device.

    Args:
        world_size: ranks that rates are divided by, those that hold the same data included.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.restart()

    def restart(self) -> None:
        """Starts a new window now. Call it after work that is no training, such as validation."""
        self._begin(_Window(time.perf_counter()))

    def _begin(self, window: "_Window") -> None:
        self._window = window
        self._num_steps = 0
        self._totals: Counter[str] = Counter()
        self._wait_seconds = 0.0

    def add(self, step: UpdateStep, wait_seconds: float) -> None:
        """Adds an update step and how long the loop waited for it."""
        self._num_steps += 1
        self._totals.update(step.totals)
        self._wait_seconds += wait_seconds

    def read_and_restart(self) -> dict[str, Late | float]:
        """The window's figures; the next window starts where this one ends: when its rates are read.

        A device may be an update step behind the host, and a window is over when the device is there.

        Returns:
            Of what the samples' kind counts:
            ``tokens_per_second_per_gpu``: target tokens over all DP ranks / (seconds * world size).
            ``real_tokens_per_second_per_gpu``: the same of all tokens but padding.
            ``images_per_second_per_gpu``: images over all DP ranks / (seconds * world size), each once however
            many crops it has; ``crop_tokens_per_second_per_gpu``: the same of their tokens in the student.
            ``padding_fraction``: padding slots / slots.
            ``shared_fraction``: tokens that are computed once instead of twice / all tokens but padding.
            ``data_wait_seconds``: mean per update step, on this rank.
        """
        figures: dict[str, Late | float] = {
            "data_wait_seconds": self._wait_seconds / max(self._num_steps, 1)
        }
        for name, figure in (
            ("target_tokens", "tokens_per_second_per_gpu"),
            ("real_tokens", "real_tokens_per_second_per_gpu"),
            ("images", "images_per_second_per_gpu"),
            ("crop_tokens", "crop_tokens_per_second_per_gpu"),
        ):
            if name in self._totals:
                figures[figure] = _Rate(self._totals[name] / self._world_size, self._window)
        num_real, num_shared = self._totals["real_tokens"], self._totals["shared_tokens"]
        if "positions" in self._totals:
            padding = 1 - (num_real - num_shared) / max(self._totals["positions"], 1)
            figures["padding_fraction"] = padding
        if "shared_tokens" in self._totals:
            figures["shared_fraction"] = num_shared / max(num_real, 1)
        if len(figures) == 1:  # without a rate, by which the window would end
            self._window.end()
        self._begin(_Window(self._window))
        return figures


class _Window:
    """Seconds from a time, or from the end of another window, to when they are asked for first."""

    def __init__(self, began: "float | _Window") -> None:
        self._began = began
        self._ended: float | None = None

    def end(self) -> float:
        """By the host's clock."""
        if self._ended is None:
            if isinstance(self._began, _Window):
                self._began = self._began.end()
            self._ended = time.perf_counter()
        return self._ended

    def seconds(self) -> float:
        """Above 0."""
        end = self.end()
        assert not isinstance(self._began, _Window)
        return max(end - self._began, 1e-9)


class _Rate(NamedTuple):
    """Of a window."""

    num_tokens: float
    window: _Window

    def read(self) -> float:
        """Per second."""
        return self.num_tokens / self.window.seconds()
