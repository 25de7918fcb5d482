"""The ranks of a job: how many along each mesh dimension, and which of them this one is.

Mesh dimensions, as torchtune's later versions name them: ``dp_replicate`` and ``dp_shard`` hold
different data, ``pp`` and ``tp`` ranks hold the same.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtune import utils

from recipe_utils.parallel import process_group
from recipe_utils.parallel.fsdp import GradientSync
from recipe_utils.settings.keys import STRICT, Count
from recipe_utils.settings.problems import ConfigError, Problem

_log = utils.get_logger("INFO")


class ParallelDims(NamedTuple):
    """Ranks along each mesh dimension; their product is the world size."""

    dp_replicate: int
    dp_shard: int
    tp: int
    pp: int = 1

    @property
    def dp_degree(self) -> int:
        """Ranks that hold different data."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, config=STRICT)
class RankSettings:
    """What each rank computes on, and how the ranks divide the work."""

    device: str | None = None
    """Where to compute: ``cpu``, ``cuda``, ...; null takes what the machine has."""
    data_parallel_replicate_dim: Count = 1
    """Copies of the sharded model (HSDP); 1 is plain FSDP2."""
    data_parallel_shard_dim: int = -1
    """Ranks that shard one copy; -1 takes what the other dimensions leave."""
    tensor_parallel_dim: Count = 1
    """Ranks that split each layer, as ``tensor_parallel_plan`` says."""
    pipeline_parallel_dim: Count = 1
    """Ranks that each have some of the layers."""
    context_parallel_dim: Count = 1
    """Only 1: PyTorch's ring attention has no CPU kernel, so more could not be tested."""
    gradient_sync: GradientSync = "each_microbatch"
    """``each_microbatch`` keeps accumulated gradients sharded; ``last_microbatch`` communicates once."""
    process_group_timeout_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """How long a rank waits for another; null takes PyTorch's."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong between the keys and with this machine."""
        try:
            resolve_device(self.device)
        except ConfigError as error:
            yield from error.problems
        if self.context_parallel_dim != 1:
            yield Problem(
                "context_parallel_dim",
                "PyTorch's ring attention has no CPU "
                "kernel, so this could not be tested and is left out; set it to 1",
                self.context_parallel_dim,
            )
        try:
            _ = self.dims
        except ConfigError as error:
            yield from error.problems

    def problems_without_stages(self) -> Iterator[Problem]:
        """Of a recipe that cuts no model into pipeline stages."""
        if self.pipeline_parallel_dim > 1:
            yield Problem(
                "pipeline_parallel_dim",
                "this recipe has no pipeline stages; set "
                "it to 1, and data_parallel_shard_dim to more ranks",
                self.pipeline_parallel_dim,
            )

    @property
    def dims_or_none(self) -> ParallelDims | None:
        """The same, for who looks for further problems."""
        try:
            return self.dims
        except ValueError:
            return None

    @property
    def dims(self) -> ParallelDims:
        """Ranks along each dimension, of as many processes as the launcher has started.

        Raises:
            ConfigError: the dimensions do not make up the number of processes.
        """
        return resolve_parallel_dims(
            process_group.world_size_from_env(),
            self.data_parallel_replicate_dim,
            self.data_parallel_shard_dim,
            self.tensor_parallel_dim,
            self.pipeline_parallel_dim,
        )


@plain_dataclass(frozen=True)
class Ranks:
    """This rank among the others. The mesh dimensions are (pp, dp_replicate, dp_shard, tp)."""

    device: torch.device
    dims: ParallelDims
    mesh: DeviceMesh
    is_dp_leader: bool
    """True on one rank of each data-parallel coordinate: the others hold the same data, which counts once."""
    timeout_seconds: float | None = None
    owns_process_group: bool = False
    """False where somebody else made the process group, who then also ends it."""

    @property
    def rank(self) -> int:
        """Of this process in the job."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return dist.get_world_size()

    @property
    def is_zero(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    @property
    def dp_degree(self) -> int:
        """Ranks that hold different data."""
        return self.dims.dp_degree

    @property
    def dp_rank(self) -> int:
        """The data-parallel coordinate, equal on ranks that differ in ``pp`` or ``tp`` only."""
        return dp_rank_of(self.mesh)

    @property
    def dp_peers(self) -> list[int]:
        """Ranks that hold the different data, in the order of their data-parallel coordinate.

        Of each pipeline and tensor-parallel group the one with this rank's place in it.
        """
        return dp_peers_of(self.mesh)

    @property
    def pp_rank(self) -> int:
        """The place in the pipeline."""
        return self.mesh.get_local_rank("pp")

    @property
    def has_last_stage(self) -> bool:
        """Whether the end of the pipeline is here; True without one."""
        return self.pp_rank == self.dims.pp - 1

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The ranks of this pipeline; None without one."""
        return self.mesh.get_group("pp") if self.dims.pp > 1 else None

    def new_cpu_group(self, has_timeout: bool = True) -> dist.ProcessGroup:
        """A gloo group of all ranks, apart from the others; background threads each need their own."""
        return process_group.new_cpu_group(self.timeout_seconds if has_timeout else None)

    @cached_property
    def cpu_group(self) -> dist.ProcessGroup:
        """The gloo group of the main thread, made at its first use by all ranks together.

        A gloo group connects each rank with all others, so what the main thread does shares one.
        """
        return self.new_cpu_group(has_timeout=False)  # may wait for the slowest disk

    @cached_property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks of :attr:`dp_peers` on the device's backend; None where this one holds all data.

        Made when it is asked for first: by all ranks together.
        """
        if self.dp_degree == 1:
            return None
        by_place = self.mesh.mesh.permute(0, 3, 1, 2).reshape(-1, self.dp_degree)
        own, _ = dist.new_subgroups_by_enumeration(by_place.tolist())
        return own

    def leave(self) -> None:
        """Ends the process group, if it was made here."""
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(settings: RankSettings) -> Ranks:
    """Joins the job's process group and takes this rank's place in the mesh. All ranks together."""
    device = resolve_device(settings.device)
    owns_process_group = process_group.init_process_group(
        device, settings.process_group_timeout_seconds
    )
    mesh = build_mesh(device, settings.dims)
    if (
        settings.dims.pp > 1
        and settings.dims.dp_degree > 1
        and settings.gradient_sync != "last_microbatch"
    ):
        utils.log_rank_zero(
            _log,
            f"gradient_sync={settings.gradient_sync}: pipeline stages keep gradients unsharded until the "
            "last microbatch, as with last_microbatch",
            level=logging.WARNING,
        )
    return Ranks(
        device=device,
        dims=settings.dims,
        mesh=mesh,
        is_dp_leader=mesh.get_local_rank("pp") == 0 and mesh.get_local_rank("tp") == 0,
        timeout_seconds=settings.process_group_timeout_seconds,
        owns_process_group=owns_process_group,
    )


def resolve_device(device: str | None) -> torch.device:
    """The device of this rank; None takes what the machine has.

    Raises:
        ConfigError: a device that is not there. (torchtune would go on with the CPU.)
    """
    try:
        found = utils.get_device(device=device)
    except Exception as error:
        raise ConfigError(
            Problem("device", f"{error}; set it to a device of this machine", device)
        ) from None
    if device is not None and found.type != torch.device(device).type:
        raise ConfigError(
            Problem(
                "device",
                f"this machine has none that PyTorch can use; set device={found.type}",
                device,
            )
        )
    return found


def resolve_parallel_dims(
    world_size: int,
    data_parallel_replicate_dim: int,
    data_parallel_shard_dim: int,
    tensor_parallel_dim: int,
    pipeline_parallel_dim: int = 1,
) -> ParallelDims:
    """Checks the mesh dimensions against the world size.

    Args:
        world_size: processes of the job.
        data_parallel_replicate_dim: copies of the sharded model (HSDP); 1 is plain FSDP.
        data_parallel_shard_dim: ranks that shard one copy; -1 takes what the others leave.
        tensor_parallel_dim: ranks that split each layer.
        pipeline_parallel_dim: ranks that each have some of the layers.

    Raises:
        ConfigError: a dimension below 1, or a product other than the world size.
    """
    for name, dim in (
        ("data_parallel_replicate_dim", data_parallel_replicate_dim),
        ("tensor_parallel_dim", tensor_parallel_dim),
        ("pipeline_parallel_dim", pipeline_parallel_dim),
    ):
        if dim < 1:
            raise ConfigError(Problem(name, "it must be at least 1; leave it out for 1", dim))
    others = data_parallel_replicate_dim * tensor_parallel_dim * pipeline_parallel_dim
    shard = data_parallel_shard_dim
    if shard == -1:
        shard = max(world_size // others, 1)
    if shard < 1:
        raise ConfigError(
            Problem(
                "data_parallel_shard_dim",
                "it must be at least 1, or -1 for what the other dimensions leave",
                shard,
            )
        )
    if shard * others != world_size:
        pipeline = f" * {pipeline_parallel_dim=}" if pipeline_parallel_dim > 1 else ""
        product = (
            f"data_parallel_replicate_dim={data_parallel_replicate_dim} * data_parallel_shard_dim="
            f"{data_parallel_shard_dim} * tensor_parallel_dim={tensor_parallel_dim}{pipeline}"
        )
        names = (
            "data_parallel_replicate_dim",
            "data_parallel_shard_dim",
            "tensor_parallel_dim",
            "pipeline_parallel_dim",
        )
        raise ConfigError(
            Problem(
                product,
                f"they make "
                f"{shard * others} ranks, but {world_size} run; set them so that their product is "
                f"{world_size}, or start {shard * others} processes (--nproc_per_node)",
                depends_on=names,
            )
        )
    return ParallelDims(
        data_parallel_replicate_dim, shard, tensor_parallel_dim, pipeline_parallel_dim
    )


def build_mesh(device: torch.device, dims: ParallelDims) -> DeviceMesh:
    """The mesh (pp, dp_replicate, dp_shard, tp) over all ranks; tp ranks are neighbours.

    Stages exchange least, so they are farthest apart.
    """
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    return init_device_mesh(
        device.type, tuple(getattr(dims, name) for name in names), mesh_dim_names=names
    )


def dp_rank_of(mesh: DeviceMesh) -> int:
    """See :attr:`Ranks.dp_rank`."""
    return mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank(
        "dp_shard"
    )


def dp_peers_of(mesh: DeviceMesh) -> list[int]:
    """See :attr:`Ranks.dp_peers`."""
    return mesh.mesh[mesh.get_local_rank("pp"), :, :, mesh.get_local_rank("tp")].flatten().tolist()
