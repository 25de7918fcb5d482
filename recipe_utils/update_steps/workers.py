"""DataLoader workers, which are replaced if they are killed."""

import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess, parent_process
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from recipe_utils.parallel.process_group import end_with_parent
from recipe_utils.torchtune_names import logger

_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))?:? ([\d, ]+)\)")
"""Start of PyTorch's error for a dead worker; errors of a dataset start differently."""


class WorkerDiedError(RuntimeError):
    """Raised if a DataLoader worker died at a single batch; contains the cause and the samples."""


def load_batches(dataset: Dataset[Any], batches: Sequence[list[Any]], num_workers: int = 0) -> Iterator[list[Any]]:
    """Yields the samples of each batch; each worker loads whole batches, a few of them ahead.

    A killed worker (for instance without memory) does not end the training: after a warning a new
    worker loads the first missing batch alone. Then all workers resume. Without workers, batches
    are loaded in the calling thread.

    Raises:
        WorkerDiedError: the new worker died, too.
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
                collate_fn=list,
                worker_init_fn=_end_with_parent_only,
                # Otherwise this background thread draws from the global generator.
                generator=torch.Generator(),
            )
        )
        # Not active_children(), which omits a worker that has died.
        workers = {process.pid: process for process in getattr(loading, "_workers", ())}
        try:
            for _ in range(len(part)):
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
                    f"num_workers={num_workers}: a DataLoader worker {how} while it loaded only samples "
                    f"{_first_of(batches[num_loaded])}, and one died before it; set num_workers=0, "
                    "which shows where a dataset ends its process, or fewer workers, which need less memory"
                ) from None
            # Batches loaded ahead are lost, too, so the cause may be any of them.
            is_alone = True
            logger.warning(
                f"A DataLoader worker {how}; a new one loads its samples. The kernel sends SIGKILL when memory runs "
                f"out; fewer workers than num_workers={num_workers} need less"
            )
        del loading  # ends its workers before others start


def _end_with_parent_only(_: int) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal; its parent saves, and needs samples until then
        signal.signal(number, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None
    end_with_parent(parent.pid or os.getppid())


def _how_they_died(error: RuntimeError, workers: Mapping[int | None, BaseProcess]) -> str | None:
    """Returns how the workers died that an error reports; None for another error."""
    died = _DIED.match(str(error))
    pids = [int(pid) for pid in died[1].split(",")] if died else []
    if not pids or not workers.keys() >= set(pids):
        return None
    ends = []
    for pid in pids:
        workers[pid].join()  # PyTorch's signal handler may be faster
        code = workers[pid].exitcode or 0
        ends.append(signal.Signals(-code).name if code < 0 else f"exit code {code}")
    return f"(pid {', '.join(map(str, pids))}) ended by {', '.join(ends)}"


def _first_of(indices: list[Any]) -> str:
    shown = ", ".join(map(str, indices[:5]))
    return shown if len(indices) <= 5 else f"{shown}, ..."
