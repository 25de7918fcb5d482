"""Sharding, and what FSDP2 is told at each backward."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torchtune import training

GradientSync = Literal["each_microbatch", "last_microbatch"]


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    custom_sharded_layers: Sequence[str] | None,
    cpu_offload: bool,
    reshard_after_forward: bool,
    compute_dtype: torch.dtype | None = None,
    left_alone: Collection[nn.Parameter] = (),
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
        compute_dtype: of forward and backward, where the trained parameters have another. Each unit's are cast
            as they are gathered; gradients are cast back before they are summed over microbatches or ranks.
            None computes in the parameters' own.
        left_alone: parameters that are neither sharded nor cast.
    """
    hsdp = mesh["dp_replicate"].size() > 1

    def is_unit(name: str, module: nn.Module) -> bool:
        # Layers that another pipeline stage has hold nothing to shard.
        return any(True for _ in module.parameters()) and training.get_shard_conditions(
            name, module, names_to_match=custom_sharded_layers
        )

    options: dict[str, Any] = {
        "mesh": mesh["dp_replicate", "dp_shard"] if hsdp else mesh["dp_shard"],
        "reshard_after_forward": reshard_after_forward,
    }
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if compute_dtype is not None:
        (weights_dtype,) = {p.dtype for p in model.parameters() if p.requires_grad}
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=weights_dtype,
            # Inputs hold a teacher's log-probabilities, too, which must keep their digits.
            cast_forward_inputs=False,
        )
    if left_alone:
        options["ignored_params"] = set(left_alone)
    # From the leaves to the root, which takes what is left: as torchtune.training.shard_model.
    for name, module in reversed(list(model.named_modules())):
        if module is not model and is_unit(name, module):
            fully_shard(module, **options)
    fully_shard(model, **options)


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard, which shares its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Frees the gathered parameters that a forward without a backward leaves in FSDP2's root module."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


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
