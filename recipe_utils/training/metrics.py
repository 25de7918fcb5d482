"""Metrics read after the next update step is enqueued, throughput, and the profiler."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig

from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.optim.nonfinite import NonfiniteGuard
from recipe_utils.parallel.process_group import mean_over_ranks
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.parallel.to_device import ToHostLater
from recipe_utils.torchtune_names import get_memory_stats, instantiate
from recipe_utils.training.log import TEXT, Log
from recipe_utils.training.parts.protocol import Metric, Part
from recipe_utils.training.settings import PROFILER, RunSettings
from recipe_utils.update_steps.step import UpdateStep

_TOTALS = {"target_tokens": "target_tokens", "weights": "target_tokens", "pairs": "pairs"}
"""Divisor of a loss -> total that is logged, as ``num_tokens`` or ``num_pairs``."""
_OF_GUARD = "num_nonfinite_steps", "most_nonfinite_in_a_row", "num_skipped_steps"
"""Names of the counts of :meth:`.NonfiniteGuard.take_counts`."""


def learning_rates(groups: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    """Returns the rate of an optimizer's parameter groups as metrics.

    ``lr`` is that of the first group. Where groups have a ``name``, each one's is ``lr/NAME``; where rates of
    unnamed groups differ, each of them is ``lr/0``, ``lr/1``, ..., in the order of their groups.
    """
    rates = {"lr": groups[0]["lr"]}
    if any("name" in group for group in groups):
        return rates | {f"lr/{group.get('name', index)}": group["lr"] for index, group in enumerate(groups)}
    different = list(dict.fromkeys(group["lr"] for group in groups))
    return rates | ({f"lr/{index}": rate for index, rate in enumerate(different)} if len(different) > 1 else {})


class Throughput:
    """Tokens and seconds by the host's clock, without device synchronization.

    Rates are divided by ``world_size``, which includes ranks with the same data.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.restart()

    def restart(self) -> None:
        """Starts a new window."""
        self._began = time.perf_counter()
        self._num_steps = 0
        self._totals: Counter[str] = Counter()
        self._wait_seconds = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Takes the time of the block out of the window. The device has finished the update steps before."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._began += time.perf_counter() - began

    def add(self, step: UpdateStep, wait_seconds: float) -> None:
        """Adds an update step and the time that the loop waited for it."""
        self._num_steps += 1
        self._totals.update(step.totals)
        self._wait_seconds += wait_seconds

    def read_and_restart(self, rates: Mapping[str, str] = TEXT.rates) -> dict[str, float]:
        """Returns the figures of the window for which update steps have totals, and ``rates``: names of totals.

        ``tokens_per_second_per_gpu``: target tokens over all DP ranks / (seconds * world size).
        ``padding_fraction``: padding / positions. ``shared_fraction``: tokens computed once instead
        of twice / real tokens. ``data_wait_seconds``: mean per update step on this rank.
        """
        totals, seconds = self._totals, max(time.perf_counter() - self._began, 1e-9)
        figures = {"data_wait_seconds": self._wait_seconds / max(self._num_steps, 1)}
        for total, name in rates.items():
            if total in totals:
                figures[f"{name}_per_second_per_gpu"] = totals[total] / self._world_size / seconds
        if "positions" in totals:
            num_computed = totals["real_tokens"] - totals["shared_tokens"]
            figures["padding_fraction"] = 1 - num_computed / max(totals["positions"], 1)
        if totals["shared_tokens"]:
            figures["shared_fraction"] = totals["shared_tokens"] / max(totals["real_tokens"], 1)
        self.restart()
        return figures


class Metrics:
    """Metrics that are reduced over ranks, read and written.

    On accelerators an update step's metrics stay on the device until the next one is enqueued. The window of
    the throughput ends when metrics are read.
    """

    divisor = "target_tokens"
    """Total that an update step's loss is divided by."""
    reported = TEXT
    """Units and main metrics of the objective."""
    most_spanning_samples = 0
    """Most samples of an update step that several ranks have computed together."""

    def __init__(self, log: Log, ranks: Ranks) -> None:
        self.late = ToHostLater(ranks.device)
        self.shown: dict[str, Any] = {}
        """Latest values, for the progress bar."""
        self.throughput = Throughput(ranks.world_size)
        self._log, self._device = log, ranks.device

    def start(self, wait_seconds: float, groups: Sequence[Mapping[str, Any]]) -> None:
        """Starts an update step, for which the loop has waited, with the rates of the optimizer's groups."""
        self._wait_seconds, self._rates = wait_seconds, learning_rates(groups)

    def stop(self, step: UpdateStep) -> None:
        """Ends an enqueued update step."""
        self.throughput.add(step, self._wait_seconds)
        self.most_spanning_samples = max(self.most_spanning_samples, int(step.totals.get("spanning_samples", 0)))

    def hold(
        self,
        state: TrainingState,
        step: UpdateStep,
        sums: Mapping[str, Tensor],
        guard: NonfiniteGuard,
        more: Mapping[str, Metric | None],
        logs_memory: bool,
    ) -> None:
        """Holds metrics of an update step until the next one is enqueued; on a CPU, writes them at once.

        Args:
            state: position after the update step.
            step: update step, whose totals are logged.
            sums: this rank's parts of metrics, [] each, of one dtype; their means over ranks are logged.
            guard: counts update steps whose optimizer step is skipped.
            more: further metrics, equal on all ranks; None is not logged. Rates in it replace the optimizer's.
            logs_memory: also logs the peak memory of an accelerator.
        """
        self.late.read()
        metrics: dict[str, Metric | None] = {**({} if "lr" in more else self._rates), **more}
        if self.divisor in _TOTALS:
            total = _TOTALS[self.divisor]
            metrics[f"num_{total.removeprefix('target_')}"] = step.totals[total]
        metrics["num_spanning_samples"] = step.totals.get("spanning_samples")
        if logs_memory and self._device.type != "cpu":
            metrics |= get_memory_stats(device=self._device)
        on_host = {name: value for name, value in metrics.items() if not (value is None or isinstance(value, Tensor))}

        # One copy to the host takes all tensors: means, further metrics, and the guard's counts.
        tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
        counts, num_steps = guard.take_counts()
        means = mean_over_ranks(torch.stack([*sums.values()]))
        # CPU offload: the gradient norm is on the CPU, the sums of losses are on the device.
        others = [
            value.detach().to(means.device, means.dtype, non_blocking=True).view(1)
            for value in (*tensors.values(), *counts)
        ]
        names = [*sums, *tensors, *_OF_GUARD]
        on_device = torch.cat([means, *others])

        def write(copied: Tensor) -> None:
            values: dict[str, Any] = dict(zip(names, copied.tolist(), strict=True))
            of_guard = {name: int(values.pop(name)) for name in _OF_GUARD}
            num_nonfinite, most_in_a_row, _ = of_guard.values()
            skipped = {name: num for name, num in of_guard.items() if num and name.startswith("num_")}
            self.write(state, {**on_host, **values, **self.throughput.read_and_restart(self.reported.rates), **skipped})
            self._log.warn(guard.judge(num_nonfinite, most_in_a_row, num_steps, state.global_step))

        self.late.hold(on_device, write)

    def measure(self, state: TrainingState, part: Part, step: UpdateStep) -> None:
        """Calls a part that is due, and writes its metrics at once. Its time is no training time."""
        with self.throughput.paused():
            values = {name: float(value) for name, value in part.after(step).items()}
            if values:
                self.write(state, values)

    def write(self, state: TrainingState, metrics: Mapping[str, Any]) -> None:
        """Writes metrics of an update step; its epoch, and the data seen, only to the metrics file."""
        self.shown |= metrics
        unit = self.reported.unit
        seen = {f"num_{unit}_seen": state.num_seen.get(unit, 0)}
        self._log.write(state.global_step, metrics, {"epoch": state.epoch, **seen})

    def close(self) -> None:
        """Writes held metrics and closes the loggers."""
        try:
            self.late.read()
        except Exception as error:  # the device's, raised elsewhere if it ends the training
            self._log.warn(f"metrics of the last update step are lost ({error})")
        self._log.close()


def build_profiler(run_settings: RunSettings, ranks: Ranks) -> Any:
    """Builds torchtune's profiler, disabled without ``profiler`` in the config.

    Traces are written below ``output_dir`` and contain the thread that prepares update steps. With
    ``profile_memory``, CUDA allocations are recorded in the active steps of the first cycle.
    """
    component: dict[str, Any] = {"_component_": PROFILER, **(run_settings.profiler or {"enabled": False})}
    if "output_dir" in component or component["_component_"] == PROFILER:
        folder = component.get("output_dir") or "profiler_output"
        component["output_dir"] = str(Path(run_settings.output_dir) / folder)  # an absolute path stays
    profiler, settings = instantiate(OmegaConf.create(component))
    if settings["enabled"] and isinstance(profiler, torch.profiler.profile):
        with_stack = bool(settings.get("with_stack"))
        profiler.experimental_config = _ExperimentalConfig(profile_all_threads=True, verbose=with_stack)
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
