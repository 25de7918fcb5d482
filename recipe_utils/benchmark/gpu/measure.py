"""What all stages share: settings, checks, and measures that are null where there is no CUDA."""

import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

Result = dict[str, Any]
"""What a stage has found, as JSON knows it. ``checks``, ``not_available`` and ``left_out`` are lists that
the command looks at; all other keys are figures."""


@dataclass(frozen=True)
class Settings:
    """Of all stages."""

    device: torch.device
    is_small: bool
    """Tiny shapes and few steps, for a CPU."""
    scratch: Path
    """A folder for what a stage writes; is removed at the end."""
    deadline: float = float("inf")
    """Of this stage, on ``time.monotonic``'s clock [seconds]."""

    @property
    def is_cuda(self) -> bool:
        """Whether what only CUDA knows can be measured."""
        return self.device.type == "cuda"

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether so much of the stage's time is left."""
        return time.monotonic() + seconds < self.deadline


def check(name: str, passed: bool, found: Any, bound: Any) -> Result:
    """One entry of ``checks``."""
    return {"name": name, "passed": bool(passed), "found": found, "bound": bound}


def at_most(name: str, found: float, bound: float) -> Result:
    """A check that a figure is no more than a bound; NaN is."""
    return check(name, found <= bound, found, bound)


def attempt(name: str, make_check: Callable[[], Result]) -> Result:
    """A check that fails with the traceback where making it raises."""
    try:
        return make_check()
    except Exception:
        return check(name, False, traceback.format_exc(), None)


def wait_for(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    call: Callable[[], Any], device: torch.device, num_warm_up: int, num_timed: int
) -> float:
    """Of one call; on CUDA between two events, so that the host may run ahead."""
    for _ in range(num_warm_up):
        call()
    wait_for(device)
    if device.type != "cuda":
        seconds = []
        for _ in range(num_timed):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_timed + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    wait_for(device)
    pairs = pairwise(events)
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in pairs)


def restart_peak(device: torch.device) -> None:
    """Begins to look for :func:`peak_gb` anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float | None:
    """Most memory that tensors took since [1e9 bytes]; None without CUDA."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None


@contextmanager
def host_waits(device: torch.device) -> Iterator[list[str] | None]:
    """Where the host waits for the device in the block: one entry a wait; None without CUDA.

    An entry is the innermost lines of the project's or torchtune's own files.
    """
    if device.type != "cuda":
        yield None
        return
    waits: list[str] = []

    def keep(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" not in str(message):
            return
        frames = [
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_stack()
            if "recipe" in frame.filename or "torchtune" in frame.filename
        ]
        waits.append(" < ".join(reversed(frames[-3:])))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = keep
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
