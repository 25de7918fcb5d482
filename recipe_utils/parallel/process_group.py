"""Process group of the job and communication between its ranks."""

import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

_IS_GONE = re.compile("Connection (closed|reset) by peer|Broken pipe|got 0 bytes|process exit(ed|ing)")
"""Errors of gloo, TCPStore and NCCL after the end of a rank. Not timeouts: the rank may only be slow."""
_POLL_SECONDS = 0.001
_PARENT_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0
"""Timeout of a failing rank that waits for another rank's error message."""
_MOMENT_SECONDS = 2.0
"""Timeout of a rank that has lost another one, which may have left with an error message."""


def world_size_from_env() -> int:
    """Returns the launcher's ``WORLD_SIZE``; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size_from_env() -> int:
    """Returns the launcher's number of processes on this node; all without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size_from_env()))


def loss_of_rank(error: BaseException | None) -> str | None:
    """Returns how the connection to another rank ended, if that caused ``error``; else None."""
    while error is not None:
        is_of_torch = isinstance(error, dist.DistError) or "gloo" in str(error)
        if is_of_torch and (how := _IS_GONE.search(str(error))):
            return how[0]
        error = error.__cause__
    return None


def end_with_parent(parent_pid: int) -> None:
    """Ends this process soon after its parent, also if that is killed.

    Ranks would train on without their launcher. PyTorch's DataLoader workers notice, but their exit
    waits for a queue that nobody reads.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="watch parent", daemon=True).start()


def init_process_group(device: torch.device, timeout_seconds: float | None = None) -> bool:
    """Initializes the default process group; without a launcher, one of a single process.

    On an accelerator it also has a gloo backend for CPU tensors. Returns False if it exists already.
    """
    if dist.is_initialized():
        return False
    backend = dist.get_default_backend_for_device(device)
    if device.type != "cpu":
        backend = f"{device.type}:{backend},cpu:gloo"
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        if timeout is not None:
            store.set_timeout(timeout)
        # torchrun keeps one store for all restarts of a job. A rank that finds keys of a killed rank
        # waits for it until the timeout (pytorch/pytorch#135712).
        store = dist.PrefixStore(name_of_this_start(store, rank, world_size), store)  # type: ignore[attr-defined]
    else:
        store, rank, world_size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    return True


def name_of_this_start(store: Store, rank: int, world_size: int) -> str:
    """Returns a name that all ranks share and that no earlier start of the job has used.

    The store may contain requests of killed ranks of earlier starts, so every other rank writes a
    request with a random id, and rank 0 answers all requests that it finds until each rank of this
    start has confirmed the name. (``TORCHELASTIC_RESTART_COUNT`` is no such name: each node has its
    own.) Raises DistStoreError if a rank does not start within the store's timeout.
    """
    start_id = uuid.uuid4().hex
    if rank != 0:
        store.set(f"start/request/{rank}", start_id)
        name = store.get(f"start/answer/{start_id}").decode()
        store.set(f"start/{name}/{rank}", "confirmed")
        return name
    # Rank 0 answers until each rank has confirmed: an answer to a killed rank's request reaches nobody.
    deadline = time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined]
    for other in range(1, world_size):
        while not store.check([f"start/{start_id}/{other}"]):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"rank {other} has not started")
            request = store.get(f"start/request/{other}").decode()
            store.set(f"start/answer/{request}", start_id)
            time.sleep(_POLL_SECONDS)
    return start_id


def new_cpu_group(timeout_seconds: float | None = None) -> dist.ProcessGroup:
    """Returns a new gloo group of all ranks, separate from that of the model's collectives."""
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # -100 stands for a rank outside the group
    return group


def mean_over_ranks(values: Tensor) -> Tensor:
    """Returns the mean over all ranks of each entry [k], in fp64, without device synchronization.

    The mean of a rank's sum of losses times ``dp_degree / N`` is the mean loss over all N target
    tokens: equal values of a tensor-parallel group count once.
    """
    values = values.detach().flatten().clone()
    dist.all_reduce(values)
    return values.double() / dist.get_world_size()


def means_over_ranks(
    sums: Mapping[str, Tensor], totals: Mapping[str, float], counts: Mapping[str, str] | str, dp_degree: int
) -> dict[str, Tensor]:
    """Returns sums over all ranks divided by counts, with one all-reduce.

    ``sums`` are this rank's by metric, [] each, of one dtype; ``totals`` are counts over all DP
    ranks; ``counts`` names the count of each metric, or one for all.
    """
    means = mean_over_ranks(torch.stack([*sums.values()])) * dp_degree
    count_of = dict.fromkeys(sums, counts) if isinstance(counts, str) else counts
    return {name: mean / (totals[count_of[name]] or 1) for name, mean in zip(sums, means, strict=True)}


def agree_on_length(length: int, group: dist.ProcessGroup) -> int:
    """Returns the length of the dataset; raises ValueError if it differs between ranks."""
    lengths = gather_objects(length, group)
    low, high = min(lengths), max(lengths)
    if low != high:
        raise ValueError(
            f"rank {lengths.index(low)} has {low} samples, rank {lengths.index(high)} has {high}; "
            "give every rank the same data"
        )
    return length


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the objects of all ranks of ``group``, in their order; a collective."""
    # Not with one rank: the group's thread would copy large objects with its own OpenMP threads, and
    # with more threads than cores, OpenMP suspends all of them after every operation.
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


# ---- Final error message ------------------------------------------------------------------------


def print_final_error(text: str | None, exit_code: int, lost: str | None = None) -> int:
    """Prints the final error message to stderr once, on rank 0, or here if rank 0 times out (30 s).

    All failing ranks must call it. Each returns after the message is printed, because the launcher
    kills all ranks once one has exited. ``text`` is None if another rank has one, or has been ``lost``: that is printed
    here unless the other one reports an error soon. Returns the exit code of the rank whose error is printed.
    """
    store = None
    # The launcher's store also holds keys of earlier starts.
    start = f"final_error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    with suppress(Exception):  # no launcher, or the host of the store has exited
        if world_size_from_env() > 1:
            patience = timedelta(seconds=_MOMENT_SECONDS if lost else _PATIENCE_SECONDS)
            store, _, _ = next(dist.rendezvous("env://", timeout=patience))  # type: ignore[attr-defined]
            store.set_timeout(patience)
            if text is not None:
                store.set(f"{start}/text", f"{exit_code} {text}")
            code, _, reported = store.get(f"{start}/text").decode().partition(" ")
            if os.environ["RANK"] != "0":
                store.wait([f"{start}/printed"], timedelta(seconds=_PATIENCE_SECONDS))
                return int(code)
            text, exit_code = text or reported, exit_code if text else int(code)
    if text or lost:
        print(text or lost, file=sys.stderr, flush=True)  # noqa: T201
    if store is not None and text is not None:
        with suppress(Exception):
            store.set(f"{start}/printed", "")
    return exit_code
