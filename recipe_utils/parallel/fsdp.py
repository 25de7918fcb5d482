"""Sharding, and what FSDP2 is told at each backward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torchtune import training

GradientSync = Literal["each_microbatch", "last_microbatch"]


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
        mesh: of :func:`recipe_utils.parallel.ranks.build_mesh`.
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
