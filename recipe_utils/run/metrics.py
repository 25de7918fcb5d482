"""Metrics of update steps, which the host does not wait for."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipe_utils.optim.nonfinite import NonfiniteGuard
from recipe_utils.parallel.process_group import mean_over_ranks
from recipe_utils.run.log import Log
from recipe_utils.run.throughput import Throughput


class _Held(NamedTuple):
    """Metrics of an update step whose tensors may still be computed by the device."""

    step: int
    position: dict[str, Any]
    metrics: dict[str, Any]
    names: list[str]  # of the numbers; the counts of skipped steps follow
    numbers: Tensor
    arrived: Any  # event of the copy to the host, None on a CPU
    guard: NonfiniteGuard
    num_steps: int  # since the guard's counts were taken last


class Metrics:
    """Reduces, reads and writes metrics.

    On an accelerator metrics of an update step are held, on the device, until the next one has been enqueued.

    Args:
        log: receives metrics.
        throughput: its window ends when metrics are read: the device is at the end of the update step then.
        reads_late: True on an accelerator.
    """

    def __init__(self, log: Log, throughput: Throughput, reads_late: bool) -> None:
        self.reads_late = reads_late
        self.shown: dict[str, Any] = {}
        """The latest of each, for the progress bar."""
        self._log = log
        self._throughput = throughput
        self._held: _Held | None = None

    def hold(
        self,
        step: int,
        position: dict[str, Any],
        sums: Mapping[str, Tensor],
        guard: NonfiniteGuard,
        metrics: Mapping[str, Any],
    ) -> None:
        """Holds metrics of an update step, or writes them at once; see :meth:`recipe_utils.run.run.Run.log`."""
        self.write_held()
        tensors = {name: each for name, each in metrics.items() if isinstance(each, Tensor)}
        counts, num_steps = guard.take_counts()
        means = mean_over_ranks(torch.stack([*sums.values()]))
        others = [each.detach().double().view(1) for each in (*tensors.values(), *counts)]
        numbers = torch.cat([means, *others])
        on_host = numbers.to("cpu", non_blocking=numbers.is_cuda)  # pinned by PyTorch
        arrived = torch.cuda.current_stream().record_event() if numbers.is_cuda else None
        known = {name: each for name, each in metrics.items() if each is not None}
        names = [*sums, *tensors]
        self._held = _Held(step, position, known, names, on_host, arrived, guard, num_steps)
        if not self.reads_late:
            self.write_held()

    def write_held(self) -> None:
        """Writes the metrics that are held, on all ranks alike. Waits for their update step."""
        held, self._held = self._held, None
        if held is None:
            return
        if held.arrived is not None:
            held.arrived.synchronize()
        *values, num_skipped, most_in_a_row = held.numbers.tolist()
        found = {**dict.fromkeys(held.names), **held.metrics}
        found |= dict(zip(held.names, values, strict=True))
        if num_skipped:
            found["num_nonfinite_steps"] = int(num_skipped)
        self.write(held.step, held.position, found | self._throughput.read_and_restart())
        text = held.guard.judge(int(num_skipped), int(most_in_a_row), held.num_steps, held.step)
        self._log.warn(text)

    def write(self, step: int, position: dict[str, Any], metrics: dict[str, Any]) -> None:
        """Writes metrics of an update step; ``position`` only to the metrics file."""
        self.shown |= metrics
        self._log.write(step, metrics, position)

    def close(self) -> None:
        """Writes the metrics that are held and closes the loggers."""
        step = self._held.step if self._held is not None else 0
        try:
            self.write_held()
        except (
            Exception
        ) as error:  # the device's, which is raised elsewhere if it ends the training
            self._log.warn(f"update step {step}: its metrics are lost ({error})")
        self._log.close()
