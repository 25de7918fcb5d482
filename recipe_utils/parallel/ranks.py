"""Process groups, device meshes, sharding and what FSDP2 is told at each backward.

Mesh dimensions, as torchtune's later versions name them: ``dp_replicate`` and ``dp_shard`` hold
different data, ``pp`` and ``tp`` ranks hold the same.
"""

import os
import time
import uuid
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtune import training
from torchtune.training import get_distributed_backend

_POLL_SECONDS = 0.001

GRADIENT_SYNC = ("each_microbatch", "last_microbatch")


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


def world_size_from_env() -> int:
    """Processes of this job, as the launcher says; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


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
        ValueError: a dimension below 1, or a product other than the world size.
    """
    for name, dim in (
        ("data_parallel_replicate_dim", data_parallel_replicate_dim),
        ("tensor_parallel_dim", tensor_parallel_dim),
        ("pipeline_parallel_dim", pipeline_parallel_dim),
    ):
        if dim < 1:
            raise ValueError(f"{name}={dim}: it must be at least 1; leave it out for 1")
    others = data_parallel_replicate_dim * tensor_parallel_dim * pipeline_parallel_dim
    shard = data_parallel_shard_dim
    if shard == -1:
        shard = max(world_size // others, 1)
    if shard < 1:
        raise ValueError(
            f"data_parallel_shard_dim={shard}: it must be at least 1, or -1 for what the other "
            "dimensions leave"
        )
    if shard * others != world_size:
        pipeline = f" * {pipeline_parallel_dim=}" if pipeline_parallel_dim > 1 else ""
        raise ValueError(
            f"data_parallel_replicate_dim={data_parallel_replicate_dim} * data_parallel_shard_dim="
            f"{data_parallel_shard_dim} * tensor_parallel_dim={tensor_parallel_dim}{pipeline}: they make "
            f"{shard * others} ranks, but {world_size} run; set them so that their product is "
            f"{world_size}, or start {shard * others} processes (--nproc_per_node)"
        )
    return ParallelDims(
        data_parallel_replicate_dim, shard, tensor_parallel_dim, pipeline_parallel_dim
    )


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


def build_mesh(device: torch.device, dims: ParallelDims) -> DeviceMesh:
    """The mesh (pp, dp_replicate, dp_shard, tp) over all ranks; tp ranks are neighbours.

    Stages exchange least, so they are farthest apart.
    """
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    return init_device_mesh(
        device.type, tuple(getattr(dims, name) for name in names), mesh_dim_names=names
    )


def dp_rank_of(mesh: DeviceMesh) -> int:
    """This rank's data-parallel coordinate, equal on ranks that differ in ``pp`` or ``tp`` only."""
    return mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank(
        "dp_shard"
    )


def counts_its_data(mesh: DeviceMesh) -> bool:
    """True on one rank of each data-parallel coordinate: the others hold the same data."""
    return mesh.get_local_rank("pp") == 0 and mesh.get_local_rank("tp") == 0


def dp_peers_of(mesh: DeviceMesh) -> list[int]:
    """Ranks that hold the different data, in the order of their data-parallel coordinate.

    Of each pipeline and tensor-parallel group the one with this rank's place in it.
    """
    return mesh.mesh[mesh.get_local_rank("pp"), :, :, mesh.get_local_rank("tp")].flatten().tolist()


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    custom_sharded_layers: Sequence[str] | None,
    cpu_offload: bool,
    reshard_after_forward: bool,
) -> None:
    """Shards a model's parameters over the data-parallel ranks, in place.

    FSDP2 over ``dp_shard``; with more than one ``dp_replicate`` rank HSDP, which shards within each
    copy and all-reduces between the copies.

    Args:
        model: on the meta device or materialised.
        mesh: of :func:`build_mesh`.
        custom_sharded_layers: names of modules to shard as units of their own, besides each layer.
        cpu_offload: keep parameters, gradients and optimizer state on the CPU.
        reshard_after_forward: free each unit's gathered parameters after its forward.
    """
    hsdp = mesh["dp_replicate"].size() > 1

    def is_unit(name: str, module: nn.Module) -> bool:
        # Layers that another pipeline stage has hold nothing to shard.
        return any(True for _ in module.parameters()) and training.get_shard_conditions(
            name, module, names_to_match=custom_sharded_layers
        )

    training.shard_model(
        model=model,
        shard_conditions=[is_unit],
        cpu_offload=cpu_offload,
        reshard_after_forward=reshard_after_forward,
        dp_mesh=mesh["dp_replicate", "dp_shard"] if hsdp else mesh["dp_shard"],
    )


@contextmanager
def gradient_sync(model: nn.Module, is_last: bool, when: str) -> Iterator[None]:
    """Around one microbatch's forward and backward: which of FSDP2's collectives run.

    Gradients accumulate over the microbatches of an update step, so what is communicated before the
    last one can wait for it. HSDP's all-reduce between the copies always waits (each all-reduce
    of a partial sum is waste). The reduce-scatter within a copy runs at each microbatch, which keeps
    the accumulated gradients sharded, unless ``when`` says otherwise. A model that is not sharded
    has no collectives and needs nothing.

    Args:
        model: after :func:`shard_model`.
        is_last: whether this is the update step's last microbatch.
        when: ``"each_microbatch"``, or ``"last_microbatch"`` for no communication before the last
            one, at the price of unsharded gradients in memory.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    # Resets the all-reduce, so it comes first.
    model.set_requires_gradient_sync(is_last or when == "each_microbatch")
    model.set_requires_all_reduce(is_last)
    # Stops no collective by itself; until the last backward FSDP2 only keeps what it prefetched.
    model.set_is_last_backward(is_last)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    pp_group: dist.ProcessGroup | None = None,
    counted_elsewhere: Container[int] = (),
) -> Tensor:
    """Clips gradients to ``max_norm`` in place and returns their norm before, shape [].

    The norm is that of all gradients together, whichever mesh they are sharded over; PyTorch's own
    function takes one mesh only. ``max_norm=inf`` measures and changes nothing.

    Args:
        parameters: of the model, or of the pipeline stages on this rank.
        max_norm: of all gradients together.
        pp_group: the ranks of this pipeline, whose gradients belong to the same norm; None without one.
        counted_elsewhere: ids of parameters that are clipped, but whose norm another rank of
            ``pp_group`` adds.
    """
    parameters_by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            parameters_by_mesh[mesh].append(parameter)

    norms = []
    for group in parameters_by_mesh.values():
        grads = [p.grad for p in group if p.grad is not None and id(p) not in counted_elsewhere]
        norm = nn.utils.get_total_norm(grads)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total_norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if pp_group is not None:
        of_stages = [torch.empty_like(total_norm) for _ in range(dist.get_world_size(pp_group))]
        dist.all_gather(of_stages, total_norm, group=pp_group)
        total_norm = torch.linalg.vector_norm(torch.stack(of_stages))

    if max_norm != float("inf"):
        for group in parameters_by_mesh.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, total_norm)
    return total_norm


def mean_over_ranks(value: Tensor) -> float:
    """The mean of a scalar over all ranks. Waits for the device.

    With ``value`` a rank's sum of losses times ``dp_degree / N``, this is the mean loss over all N
    target tokens: ranks of one tensor-parallel group contribute equal values, which the mean counts
    once.
    """
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


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
    if not dist.is_initialized():
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered
