"""Metrics read after the next update step is enqueued, throughput, and the profiler."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchtune import config

from recipe_utils.optim.nonfinite import NonfiniteGuard
from recipe_utils.parallel.process_group import mean_over_ranks
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.training.log import Log
from recipe_utils.training.settings import PROFILER
from recipe_utils.update_steps.step import UpdateStep

_RATES = {
    "target_tokens": "tokens_per_second_per_gpu",
    "real_tokens": "real_tokens_per_second_per_gpu",
    "images": "images_per_second_per_gpu",
    "crop_tokens": "crop_tokens_per_second_per_gpu",
}


class Throughput:
    """Tokens and seconds by the host's clock, without device synchronization.

    Rates are divided by ``world_size``, which includes ranks with the same data.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.restart()

    def restart(self) -> None:
        """Starts a new window. Call it after other work than training, such as validation."""
        self._began = time.perf_counter()
        self._num_steps = 0
        self._totals: Counter[str] = Counter()
        self._wait_seconds = 0.0

    def add(self, step: UpdateStep, wait_seconds: float) -> None:
        """Adds an update step and the time that the loop waited for it."""
        self._num_steps += 1
        self._totals.update(step.totals)
        self._wait_seconds += wait_seconds

    def read_and_restart(self) -> dict[str, float]:
        """Returns the figures of the window for which update steps have counts.

        ``tokens_per_second_per_gpu``: target tokens over all DP ranks / (seconds * world size);
        ``real_tokens``: all tokens but padding; ``crop_tokens``: the student's.
        ``padding_fraction``: padding / positions. ``shared_fraction``: tokens computed once instead
        of twice / real tokens. ``data_wait_seconds``: mean per update step on this rank.
        """
        totals, seconds = self._totals, max(time.perf_counter() - self._began, 1e-9)
        figures = {"data_wait_seconds": self._wait_seconds / max(self._num_steps, 1)}
        for name, figure in _RATES.items():
            if name in totals:
                figures[figure] = totals[name] / self._world_size / seconds
        if "positions" in totals:
            num_computed = totals["real_tokens"] - totals["shared_tokens"]
            figures["padding_fraction"] = 1 - num_computed / max(totals["positions"], 1)
        if totals["shared_tokens"]:
            figures["shared_fraction"] = totals["shared_tokens"] / max(totals["real_tokens"], 1)
        self.restart()
        return figures


class Metrics:
    """Metrics that are reduced over ranks, read and written.

    With ``reads_late`` (on accelerators) an update step's metrics stay on the device until the next
    one is enqueued. The window of ``throughput`` ends when metrics are read.
    """

    def __init__(self, log: Log, throughput: Throughput, reads_late: bool) -> None:
        self.reads_late = reads_late
        self.shown: dict[str, Any] = {}
        """Latest values, for the progress bar."""
        self._log = log
        self._throughput = throughput
        self._held: Callable[[], None] | None = None

    def hold(
        self,
        step: int,
        position: dict[str, Any],
        sums: Mapping[str, Tensor],
        guard: NonfiniteGuard,
        metrics: Mapping[str, Any],
    ) -> None:
        """Holds metrics of an update step, or writes them at once; see :meth:`.Run.log`."""
        self.write_held()
        tensors = {name: each for name, each in metrics.items() if isinstance(each, Tensor)}
        counts, num_steps = guard.take_counts()
        means = mean_over_ranks(torch.stack([*sums.values()]))
        # CPU offload: the gradient norm is on the CPU, the sums of losses are on the device.
        others = [
            each.detach().to(means.device, means.dtype, non_blocking=True).view(1)
            for each in (*tensors.values(), *counts)
        ]
        numbers = torch.cat([means, *others])
        on_host = numbers.to("cpu", non_blocking=numbers.is_cuda)  # pinned by PyTorch
        arrived = torch.cuda.current_stream().record_event() if numbers.is_cuda else None

        def write() -> None:
            if arrived is not None:
                arrived.synchronize()
            *values, num_skipped, most_in_a_row = on_host.tolist()
            found: dict[str, Any] = dict(zip([*sums, *tensors], values, strict=True))
            known = {name: each for name, each in metrics.items() if each is not None}
            found = {**known, **found, **self._throughput.read_and_restart()}
            if num_skipped:
                found["num_nonfinite_steps"] = int(num_skipped)
            self.write(step, position, found)
            self._log.warn(guard.judge(int(num_skipped), int(most_in_a_row), num_steps, step))

        self._held = write
        if not self.reads_late:
            self.write_held()

    def write_held(self) -> None:
        """Writes held metrics after waiting for their update step. All ranks call it."""
        held, self._held = self._held, None
        if held is not None:
            held()

    def write(self, step: int, position: dict[str, Any], metrics: dict[str, Any]) -> None:
        """Writes metrics of an update step; ``position`` only to the metrics file."""
        self.shown |= metrics
        self._log.write(step, metrics, position)

    def close(self) -> None:
        """Writes held metrics and closes the loggers."""
        try:
            self.write_held()
        except Exception as error:  # the device's, raised elsewhere if it ends the training
            self._log.warn(f"metrics of the last update step are lost ({error})")
        self._log.close()


def build_profiler(cfg: Mapping[str, Any] | None, ranks: Ranks) -> Any:
    """Builds torchtune's profiler, disabled if ``cfg`` is None.

    With ``profile_memory``, CUDA allocations are recorded in the active steps of the first cycle.
    """
    component = OmegaConf.create({"_component_": PROFILER, **(cfg or {"enabled": False})})
    profiler, settings = config.instantiate(component)
    is_on_cuda = ranks.is_zero and ranks.device.type == "cuda"
    if is_on_cuda and settings["enabled"] and settings.get("profile_memory"):
        first = settings["wait_steps"] + settings["warmup_steps"]
        last = first + settings["active_steps"]
        step = profiler.step

        def step_and_switch() -> None:
            step()  # dumps the trace and the memory snapshot after the last active step
            if profiler.step_num == first:
                torch.cuda.memory._record_memory_history()
            elif profiler.step_num == last:
                torch.cuda.memory._record_memory_history(enabled=None)

        profiler.step = step_and_switch
        if first == 0:
            torch.cuda.memory._record_memory_history()
    return profiler
