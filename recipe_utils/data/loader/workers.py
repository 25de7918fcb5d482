"""DataLoader processes that load batches of samples ahead, and what happens where one is killed."""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchtune.utils import get_logger

_log = get_logger("INFO")

_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))?:? ([\d, ]+)\)")
"""How PyTorch's error begins where a worker is gone; what a dataset raises begins otherwise."""


class WorkerDiedError(RuntimeError):
    """A DataLoader worker that loaded one batch and nothing else died; the message says how, and names its samples."""


def load_batches(
    dataset: Dataset[Any], batches: Sequence[list[int]], num_workers: int = 0
) -> Iterator[list[Any]]:
    """Loads one batch after the other; with workers, each loads whole ones of its own, a few of them ahead.

    A worker that is killed, as the kernel does where memory ends, does not end a training of three weeks: a warning
    says so, and another one loads the first batch that has not come, and nothing ahead of it. Then all go on.

    Args:
        dataset: map-style.
        batches: dataset indices of each.
        num_workers: worker processes; 0 loads in the calling thread.

    Yields:
        What the dataset returns for the next batch.

    Raises:
        WorkerDiedError: the worker that was to load one batch alone died, too.
    """
    num_loaded = 0
    is_alone = False
    while num_loaded < len(batches):
        part = batches[num_loaded : num_loaded + 1] if is_alone else batches[num_loaded:]
        loading = iter(
            DataLoader(
                dataset,
                batch_sampler=part,
                num_workers=min(num_workers, len(part)),
                collate_fn=_keep_as_list,
                # Of its own: from a background thread the global generator would be drawn from at any moment.
                generator=torch.Generator(),
            )
        )
        workers = {process.pid: process for process in active_children()} if num_workers else {}
        try:
            for _ in part:
                loaded = next(loading)
                num_loaded += 1
                yield loaded
            is_alone = False
        except RuntimeError as error:
            how = _how_they_died(error, workers)
            if how is None:
                raise
            if is_alone:
                raise WorkerDiedError(
                    f"num_workers={num_workers}: a DataLoader worker {how} while it loaded samples "
                    f"{_first_of(batches[num_loaded])} and nothing else, and one before it, too; set num_workers=0, "
                    "which shows where a dataset ends its process, or fewer, which need less memory"
                ) from None
            # What it had loaded ahead may be lost with it, so whose batch it was is not known yet.
            is_alone = True
            _log.warning(
                f"A DataLoader worker {how}; another goes on with what it was to load. SIGKILL is what the kernel "
                f"sends where memory ends: fewer than num_workers={num_workers} need less"
            )


def _how_they_died(error: RuntimeError, workers: Mapping[int | None, BaseProcess]) -> str | None:
    """The end of the workers that an error is about; None of another error."""
    found = _DIED.match(str(error))
    pids = [int(pid) for pid in found[1].split(",")] if found else []
    if not pids or not workers.keys() >= set(pids):
        return None
    ends = []
    for pid in pids:
        workers[pid].join()  # PyTorch's handler of signals may have been faster
        code = workers[pid].exitcode or 0
        ends.append(signal.Signals(-code).name if code < 0 else f"exit code {code}")
    return f"(pid {', '.join(map(str, pids))}) ended by {', '.join(ends)}"


def _first_of(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:5]))
    return shown if len(indices) <= 5 else f"{shown}, ..."


def _keep_as_list(samples: list[Any]) -> list[Any]:
    return samples
