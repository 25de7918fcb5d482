"""Device mesh of a job and this rank's coordinates in it.

Dimensions are named as in later torchtune versions: ranks that differ in ``dp_replicate`` or ``dp_shard`` load
different data, ranks that differ in ``pp`` or ``tp`` only the same.

Example: 8 ranks with ``data_parallel_replicate_dim=2`` and ``tensor_parallel_dim=2``, so that 2 are left to shard:

                  dp_shard 0        dp_shard 1
    copy 0        ranks 0 and 1     ranks 2 and 3     FSDP2 gathers weights from ranks 0 and 2, and from 1 and 3
    copy 1        ranks 4 and 5     ranks 6 and 7     gradients are summed over ranks 0 and 4, 1 and 5, ...

Ranks 0 and 1 split each layer and have the same rows. ``dp_degree`` is 4, and ``dp_peers`` of rank 1 are 1, 3, 5 and 7.
"""

import logging
import os
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from recipe_utils.parallel import process_group
from recipe_utils.parallel.fsdp import GradientSync
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.torchtune_names import log_rank_zero

_ACCELERATORS = ("cuda", "npu", "xpu")
"""Device types that are numbered by ``LOCAL_RANK``; the first that is available is the default."""


class ParallelDims(NamedTuple):
    """Ranks along each mesh dimension; their product is the world size."""

    dp_replicate: int
    dp_shard: int
    tp: int
    pp: int = 1

    @property
    def dp_degree(self) -> int:
        """Number of ranks with different data."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True)
class Ranks:
    """This rank in the mesh (pp, dp_replicate, dp_shard, tp)."""

    device: torch.device
    dims: ParallelDims
    mesh: DeviceMesh
    dp_peers: list[int]
    """Ranks with this rank's ``pp`` and ``tp``, by data-parallel coordinate."""
    dp_rank: int
    """Data-parallel coordinate, equal on ranks that differ in ``pp`` or ``tp`` only."""
    is_dp_leader: bool
    """True on one rank of each data-parallel coordinate, so that its data count once."""
    pp_rank: int
    """Index in the pipeline."""
    timeout_seconds: float | None
    owns_process_group: bool
    """False if the process group existed before; its creator destroys it."""

    @property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return dist.get_world_size()

    @property
    def is_zero(self) -> bool:
        """Returns True on rank 0."""
        return dist.get_rank() == 0

    @property
    def dp_degree(self) -> int:
        """Returns the number of ranks with different data."""
        return self.dims.dp_degree

    @property
    def has_last_stage(self) -> bool:
        """Returns True on the last pipeline stage, and without a pipeline."""
        return self.pp_rank == self.dims.pp - 1

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """Returns the group of this pipeline; None without one."""
        return self.mesh.get_group("pp") if self.dims.pp > 1 else None

    # Gloo groups of all ranks; the first use of each is collective. Each connects every rank with all
    # others, so there is one for every thread that communicates beside others, and no more.

    @cached_property
    def cpu_group(self) -> dist.ProcessGroup:
        """Returns the group of the main thread: the default one if that fits."""
        default = dist.group.WORLD
        assert default is not None
        # The main thread may wait for the slowest disk, longer than a timeout of the config.
        if self.timeout_seconds is None and "gloo" in dist.get_backend_config(default):
            return default
        return process_group.new_cpu_group()

    @cached_property
    def checkpoint_group(self) -> dist.ProcessGroup:
        """Returns the group of the thread that writes asynchronous checkpoints."""
        return process_group.new_cpu_group()

    @cached_property
    def prefetch_group(self) -> dist.ProcessGroup:
        """Returns the group of the thread that prefetches training data."""
        return process_group.new_cpu_group(self.timeout_seconds)

    @cached_property
    def validation_group(self) -> dist.ProcessGroup:
        """Returns the group of the thread that prefetches validation data, while training data are prefetched."""
        return process_group.new_cpu_group(self.timeout_seconds)

    @cached_property
    def dp_group(self) -> dist.ProcessGroup:
        """Returns the group of :attr:`dp_peers`, also of one alone; its first use is collective."""
        return self.new_subgroup(self.dp_degree)

    def new_subgroup(self, size: int) -> dist.ProcessGroup:
        """Returns a new group of so many neighboring :attr:`dp_peers`; collective."""
        group, _ = dist.new_subgroups_by_enumeration(self.mesh.mesh.permute(0, 3, 1, 2).reshape(-1, size).tolist())
        assert isinstance(group, dist.ProcessGroup)  # every rank is in one of them
        return group

    def leave(self) -> None:
        """Destroys the process group if this object created it."""
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(
    device: str | None = None,
    dims: ParallelDims | None = None,
    timeout_seconds: float | None = None,
    gradient_sync: GradientSync = "each_microbatch",
) -> Ranks:
    """Joins the process group and builds the mesh; a collective of all ranks.

    Args:
        device: type of each rank's device; None selects the accelerator if there is one.
        dims: ranks along each dimension; None makes all data-parallel.
        timeout_seconds: timeout of collectives [s]; None for PyTorch's default.
        gradient_sync: what the training asks for; a warning is logged where pipeline stages do otherwise.
    """
    own_device = resolve_device(device)
    dims = dims or ParallelDims(1, process_group.world_size_from_env(), 1)
    owns_process_group = process_group.init_process_group(own_device, timeout_seconds)
    mesh = build_mesh(own_device, dims)
    if dims.pp > 1 and dims.dp_degree > 1 and gradient_sync != "last_microbatch":
        text = f"gradient_sync={gradient_sync}: pipeline stages keep gradients unsharded until the last microbatch"
        log_rank_zero(f"{text}, as with last_microbatch", logging.WARNING)
    # Ranks with other data are those that differ in the two middle dimensions of the mesh.
    pp_rank, tp_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("tp")
    dp_peers = mesh.mesh[pp_rank, :, :, tp_rank].flatten().tolist()
    return Ranks(
        own_device,
        dims,
        mesh,
        dp_peers,
        dp_rank=dp_peers.index(dist.get_rank()),
        is_dp_leader=pp_rank == 0 and tp_rank == 0,
        pp_rank=pp_rank,
        timeout_seconds=timeout_seconds,
        owns_process_group=owns_process_group,
    )


def resolve_device(device: str | None) -> torch.device:
    """Returns the device of this rank, and makes it the current one; None selects the accelerator if there is one.

    Raises ConfigError if it is not available.
    """
    available = [name for name in _ACCELERATORS if hasattr(torch, name) and getattr(torch, name).is_available()]
    local_rank = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None
    try:
        found = torch.device([*available, "cpu"][0] if device is None else device)
        if found.type in _ACCELERATORS and found.type not in available:
            text = f"this machine has none that PyTorch can use; set device={[*available, 'cpu'][0]}"
            raise ConfigError(Problem("device", text, device))
        # torchrun starts one process for each device of a node, with its number in LOCAL_RANK.
        if found.type in _ACCELERATORS:
            found = torch.device(found.type, (local_rank or 0) if found.index is None else found.index)
            if found.index >= (count := getattr(torch, found.type).device_count()):
                raise RuntimeError(f"{found} is none of {count} devices")
            getattr(torch, found.type).set_device(found)
        if found.type != "cpu" and local_rank not in (None, found.index):
            raise RuntimeError(f"{found} is not the device of local rank {local_rank}")
        torch.empty(0, device=found)  # an error if it is not available
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(Problem("device", f"{error}; set it to a device of this machine", device)) from None
    return found


def build_mesh(device: torch.device, dims: ParallelDims) -> DeviceMesh:
    """Builds the mesh (pp, dp_replicate, dp_shard, tp).

    ``tp`` ranks, which communicate most, are neighbors; ``pp`` ranks are farthest apart.
    """
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    return init_device_mesh(device.type, tuple(getattr(dims, name) for name in names), mesh_dim_names=names)
