"""Comparison of a training's measured peak memory with its forecast, which another process computes."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_OF_RANKS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Prefixes of the launcher's environment variables, which the process must not inherit."""


class ExpectedPeak:
    """Forecast of the peak of a training's second update step, whose optimizer has its state.

    Args:
        recipe: path of the recipe file.
        config: path of its config.
        num_ranks: ranks of the training.
    """

    def __init__(self, recipe: str, config: Path, num_ranks: int) -> None:
        self._command = [sys.executable, "-m", "recipe_utils.forecast", recipe]
        self._command += ["--config", str(config), "--ranks", str(num_ranks)]
        self._num_steps = self._longest = self._measured = 0
        self._process: subprocess.Popen[str] | None = None

    def before(self) -> None:
        """Starts an update step."""
        if self._num_steps == 1:
            torch.cuda.reset_peak_memory_stats()

    def after(self, step: Any) -> str:
        """Returns a line to log after an enqueued update step, empty until there is a forecast."""
        self._num_steps += 1
        if self._num_steps == 2 and step.longest:
            self._start(step.longest, len(step.microbatches), torch.cuda.max_memory_allocated())
        return "" if self._process is None or self._process.poll() is None else self._line()

    def _start(self, longest: int, num_microbatches: int, measured: int) -> None:
        self._longest, self._measured = longest, measured
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_RANKS)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        row = ["--row", str(longest), "--microbatches", str(min(num_microbatches, 2))]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with suppress(OSError):  # training does not depend on it
            self._process = subprocess.Popen([*self._command, *row], env=environment, **pipes)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)

    def _line(self) -> str:
        assert self._process is not None
        printed, self._process = self._process.communicate()[0].split(), None
        if not printed or not printed[-1].isdigit():
            return ""  # no forecast for this config
        expected, measured = int(printed[-1]) / 2**30, self._measured / 2**30
        text = f"expected {expected:.2f} GiB (recipe_utils.forecast), measured {measured:.2f} GiB"
        return f"Peak memory at rows of {self._longest:,} tokens: {text} ({measured / expected - 1:+.1%})"

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
