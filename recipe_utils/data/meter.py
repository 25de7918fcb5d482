"""Measurement of an update step's memory on its device."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import torch

from recipe_utils.parallel.ranks import resolve_device
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.update_steps.settings import DataSettings

_LIMIT = 0.9
"""Share of the memory that an update step may take; the rest is for fragmentation."""


class Measured(NamedTuple):
    """Memory of an update step on this rank [bytes]."""

    before: int
    """Bytes before the first forward."""
    peak: int
    limit: int
    """Bytes that ``peak`` may reach."""
    has_retried: bool = False
    """True if the allocator freed its cached blocks to find space, as it does before it fails."""


class CudaMeter:
    """Meter of a CUDA device, which counts active bytes on the host when work is enqueued.

    Reserved bytes include blocks of earlier shapes; allocated bytes exclude blocks that another stream
    still uses. The limit excludes memory of other processes and libraries.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = torch.cuda.get_device_properties(device).total_memory

    def start(self) -> None:
        """Starts an update step, before its first forward."""
        torch.cuda.reset_peak_memory_stats(self._device)
        stats = torch.cuda.memory_stats(self._device)
        self._before = stats["active_bytes.all.current"]
        self._num_retries = stats["num_alloc_retries"]

    def stop(self) -> Measured:
        """Returns the memory of an enqueued update step."""
        stats = torch.cuda.memory_stats(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        limit = int(_LIMIT * (free + stats["reserved_bytes.all.current"]))
        has_retried = stats["num_alloc_retries"] > self._num_retries
        return Measured(self._before, stats["active_bytes.all.peak"], limit, has_retried)


METERS: dict[str, Callable[[torch.device], CudaMeter]] = {"cuda": CudaMeter}
"""Meters by the type of the device."""


def budget_on_ranks(data: DataSettings, ranks: RankSettings) -> Iterator[Problem]:
    """Yields the problem of a device whose memory cannot be measured."""
    if data.microbatching == "in_order" or data.max_tokens_per_microbatch != "auto":
        return
    with suppress(ConfigError):  # a problem of ``device`` by itself
        if resolve_device(ranks.device).type not in METERS:
            text = (
                "this device has no exact peak of memory to measure; set a number (on a CPU all from 512 "
                "on are about equally fast)"
            )
            yield Problem("max_tokens_per_microbatch", text, "auto")
