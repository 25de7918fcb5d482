"""A meter of update steps on a CPU: the true bytes of live storages, with a simulated limit."""

import time
from contextlib import contextmanager

import pytest
import torch

from recipe_utils.data.text import collator
from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.memory.budget import Measured
from recipe_utils.memory.meter import METERS

FIRST_TOKENS = 16


class LiveMeter:
    """Bytes beyond what existed before the first update step."""

    def __init__(self, limit):
        self.limit, self.total_bytes = limit, 1
        self._live, self.peaks, self._is_started = LiveBytes(), [], False

    def start(self):
        if self._is_started:  # an update step is repeated
            self._live.__exit__(None, None, None)
        self._is_started, self._began = True, time.perf_counter()
        self._live.__enter__()
        self._before = self._live.peak = self._live.now

    def stop(self):
        self._is_started = False
        self._live.__exit__(None, None, None)
        self.peaks.append(self._live.peak)
        seconds = time.perf_counter() - self._began
        return Measured(self._before, self._live.peak, self.limit), lambda: seconds


@contextmanager
def pretended(*limits, total_bytes=1):
    """Gives each rank a meter with a limit of its own [bytes], and a first budget for tiny samples."""
    made = LiveMeter(limits[torch.distributed.get_rank() if len(limits) > 1 else 0])
    made.total_bytes = total_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METERS, "cpu", lambda device: made)
        patch.setattr(collator, "FIRST_TOKENS", FIRST_TOKENS)
        yield made
