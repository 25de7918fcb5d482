"""The job's process group, and what its ranks tell each other over the CPU."""

import os
import sys
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
from torchtune.training import get_distributed_backend

_POLL_SECONDS = 0.001
_PATIENCE_SECONDS = 30.0
"""How long a rank that leaves waits for another to say why."""


def world_size_from_env() -> int:
    """Processes of this job, as the launcher says; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_process_group(device: torch.device, timeout_seconds: float | None = None) -> bool:
    """Joins the job's process group, or makes one of a single process without a launcher.

    On an accelerator the group can also communicate between CPUs (gloo).

    Args:
        device: where the model is.
        timeout_seconds: how long a collective waits for a rank; None for PyTorch's default.

    Returns:
        False when the process group existed already; whoever made it then also ends it.
    """
    if dist.is_initialized():
        return False
    backend = get_distributed_backend(device.type, offload_ops_to_cpu=device.type != "cpu")
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        if timeout is not None:
            store.set_timeout(timeout)
        # torchrun keeps one store for all restarts of a job. A rank that finds there what a killed one
        # has left waits for that one until the timeout (pytorch/pytorch#135712).
        name = name_of_this_start(store, rank, world_size)
        store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    else:
        store, rank, world_size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    return True


def name_of_this_start(store: Store, rank: int, world_size: int) -> str:
    """A name that all ranks agree on and that no earlier start of the job has had.

    Rank 0 makes one up and must not give it away for nothing: the store may hold what ranks of earlier
    starts have said there, who are dead. So every other rank asks with a random word of its own, and
    rank 0 answers all that it finds, until this start's ranks have had their answer. (The launcher's
    count of restarts is no such name: each node has its own count.)

    Args:
        store: of all ranks; its timeout bounds how long a rank is waited for.
        rank: of this process.
        world_size: number of ranks.

    Raises:
        torch.distributed.DistStoreError: a rank did not come within the store's timeout.
    """
    own_word = uuid.uuid4().hex
    if rank != 0:
        store.set(f"start/question/{rank}", own_word)
        name = store.get(f"start/answer/{own_word}").decode()
        store.set(f"start/{name}/{rank}", "answered")
        return name
    deadline = time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined]
    for other in range(1, world_size):
        while not store.check([f"start/{own_word}/{other}"]):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"rank {other} has not started")
            question = store.get(f"start/question/{other}").decode()
            store.set(f"start/answer/{question}", own_word)
            time.sleep(_POLL_SECONDS)
    return own_word


def new_cpu_group(timeout_seconds: float | None = None) -> dist.ProcessGroup:
    """A gloo group of all ranks, apart from the one that the model's collectives use."""
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    return dist.new_group(backend="gloo", timeout=timeout)


def mean_over_ranks(values: Tensor) -> Tensor:
    """The means of a vector's entries over all ranks, in one reduction, [k] in fp64 on the same device.

    With an entry a rank's sum of losses times ``dp_degree / N``, its mean is the mean loss over all N
    target tokens: ranks of one tensor-parallel group contribute equal values, which the mean counts
    once. The host does not wait for a device that is none of its own.
    """
    values = values.detach().flatten().clone()
    dist.all_reduce(values)
    return values.double() / dist.get_world_size()


def ratios(
    sums: Mapping[str, Tensor],
    totals: Mapping[str, int],
    counts: Mapping[str, str] | str,
    dp_degree: int,
) -> dict[str, Tensor]:
    """Returns sums over the data of all ranks, divided by counts of these data, in one reduction.

    Args:
        sums: this rank's sums [] by metric, of one dtype.
        totals: counts over all DP ranks, by name.
        counts: the count that each metric is divided by, or one for all.
        dp_degree: number of ranks with different data.
    """
    means = mean_over_ranks(torch.stack([*sums.values()])) * dp_degree
    count_of = dict.fromkeys(sums, counts) if isinstance(counts, str) else counts
    return {
        name: mean / max(totals[count_of[name]], 1) for name, mean in zip(sums, means, strict=True)
    }


def agree_on_length(length: int, group: dist.ProcessGroup) -> int:
    """Checks that all ranks see a dataset of the same length, and returns it.

    Raises:
        ValueError: they do not; then ranks would deal out different samples, or wait for each other.
    """
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    lengths[dist.get_rank(group)] = length
    dist.all_reduce(lengths, group=group)
    if lengths.min() != lengths.max():
        raise ValueError(
            f"rank {int(lengths.argmin())} has {int(lengths.min())} samples, rank "
            f"{int(lengths.argmax())} has {int(lengths.max())}; give every rank the same data"
        )
    return length


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank of ``group`` has passed, in the order of the ranks. Waits for all of them."""
    # Not for one rank: the group's thread would copy large objects with OpenMP threads of its own, and where
    # there are more of those than cores, OpenMP puts all of them to sleep after every operation.
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


# ---- Final error message -------------------------------------------------------------------------------------


def print_final_error(text: str | None) -> None:
    """Prints why the ranks leave, once, on rank 0; where that does not come within half a minute, here.

    To be called on all ranks that leave. None returns before it is printed, since the launcher ends all ranks
    as soon as one has left.

    Args:
        text: goes to stderr; of rank 0 if it has one, else of the first that has. None where another rank's
            tells why.
    """
    store = None
    with suppress(Exception):  # alone, or what holds the store is gone
        if world_size_from_env() > 1:
            store = _launchers_store()
            store.set_timeout(timedelta(seconds=_PATIENCE_SECONDS))
            if os.environ["RANK"] == "0":
                text = text or store.get(_final_error_key("text")).decode()
            else:
                if text is not None:
                    store.set(_final_error_key("text"), text)
                store.wait([_final_error_key("told")])
                return
    if text is not None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    if store is not None:
        with suppress(Exception):
            store.set(_final_error_key("told"), "told")


def _launchers_store() -> Store:
    store, _, _ = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    return store


def _final_error_key(what: str) -> str:
    """A key of this start of the ranks; the launcher's store holds those of earlier ones, too."""
    return f"final_error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}"
