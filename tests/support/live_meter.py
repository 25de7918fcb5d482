"""A meter of update steps on a CPU: the true bytes of live storages, with a simulated limit."""

from contextlib import contextmanager

import pytest
import torch

from recipe_utils.data.meter import METERS, Measured
from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.text import limits as text_limits

FIRST_TOKENS = 16


class LiveMeter:
    """Bytes beyond what existed before the first update step."""

    def __init__(self, limit):
        self.limit, self.total_bytes = limit, 1
        self._live, self.peaks = LiveBytes(), []

    def start(self):
        self._live.__enter__()
        self._before = self._live.peak = self._live.now

    def stop(self):
        self._live.__exit__(None, None, None)
        self.peaks.append(self._live.peak)
        return Measured(self._before, self._live.peak, self.limit)


@contextmanager
def pretended(*limits, total_bytes=1):
    """Gives each rank a meter with a limit of its own [bytes], and a first budget for tiny samples."""
    made = LiveMeter(limits[torch.distributed.get_rank() if len(limits) > 1 else 0])
    made.total_bytes = total_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METERS, "cpu", lambda device: made)
        patch.setattr(text_limits, "FIRST_TOKENS", FIRST_TOKENS)
        yield made
