"""Sharding with FSDP2 and its collectives during gradient accumulation."""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

GradientSync = Literal["each_microbatch", "last_microbatch"]


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    custom_sharded_layers: Sequence[str] | None,
    cpu_offload: bool,
    reshard_after_forward: bool,
    compute_dtype: torch.dtype | None = None,
    ignored: Collection[nn.Parameter] = (),
    of_root: Collection[nn.Parameter] = (),
) -> None:
    """Shards a model in place with FSDP2 over ``dp_shard``; HSDP if ``dp_replicate`` is above 1.

    Units are the layers and the modules in ``custom_sharded_layers``. For a ``compute_dtype``
    parameters are cast as they are gathered, and gradients are upcast before they are summed;
    ``ignored`` parameters are neither sharded nor cast. ``of_root`` are parameters that some ranks do not compute, as those
    of a tower without images: modules of these alone are no units, whose collectives would not meet.
    """
    hsdp = mesh["dp_replicate"].size() > 1

    layers = getattr(model, "layers", None)
    layers_of_transformers = set(map(id, layers)) if isinstance(layers, list) else ()

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
            # Inputs include a teacher's log-probabilities, which must keep their precision.
            cast_forward_inputs=False,
        )
    if ignored:
        options["ignored_params"] = set(ignored)
    ids_of_root = set(map(id, of_root))
    # From the leaves to the root, with the units of torchtune.training.shard_model: ``layers.0``, and modules by name.
    for name, module in reversed(list(model.named_modules())):
        is_layer = re.fullmatch(r"(.*\.)?layers\.\d+", name) or id(module) in layers_of_transformers
        is_unit = is_layer or name in (custom_sharded_layers or ())
        # Layers of other pipeline stages have no parameters.
        if module is not model and is_unit and any(id(p) not in ids_of_root for p in module.parameters()):
            fully_shard(module, **options)
    fully_shard(model, **options)


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard as a view; a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_as(parameter: Tensor, rows: Tensor) -> Tensor:
    """Returns this rank's ``rows`` as a part of a tensor that is sharded as ``parameter``.

    Its last dimension may differ from the parameter's, which then must not be sharded in it.
    """
    if not isinstance(parameter, DTensor):
        return rows
    is_alike = rows.shape == local(parameter).shape
    shape = parameter.shape if is_alike else torch.Size((*parameter.shape[:-1], rows.size(-1)))
    layout: dict[str, Any] = {"shape": shape, "stride": torch.empty(shape, device="meta").stride(), "run_check": False}
    return DTensor.from_local(rows, parameter.device_mesh, parameter.placements, **layout)


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters, which FSDP2's root module keeps after a forward without backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gradient_sync(model: nn.Module, is_last: bool, when: GradientSync = "each_microbatch") -> Iterator[None]:
    """Selects FSDP2's collectives for one microbatch; no effect on a model that is not sharded.

    HSDP's all-reduce between copies runs with the last microbatch of an update step only. ``when``
    is that of the reduce-scatter within a copy: with ``"each_microbatch"``, which keeps accumulated
    gradients sharded, or with the ``"last_microbatch"``.

    Example: four microbatches of a 1B model in fp32 on 2 copies of 8 ranks. With ``"each_microbatch"`` a rank
    takes part in 4 reduce-scatters and 1 all-reduce per unit, and holds 0.5 GB of gradients. With
    ``"last_microbatch"`` it is 1 reduce-scatter and 1 all-reduce, but until then it holds all 4 GB.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    # First, because it also sets the all-reduce.
    model.set_requires_gradient_sync(is_last or when == "each_microbatch")
    model.set_requires_all_reduce(is_last)
    # Skips no collective: until the last backward FSDP2 keeps its prefetching state.
    model.set_is_last_backward(is_last)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
