"""The norm of all gradients together, and clipping to it."""

from collections import defaultdict
from collections.abc import Container
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class OverStages(Protocol):
    """What a norm over the stages of a pipeline needs of it."""

    group: dist.ProcessGroup
    """The ranks of the pipeline."""
    tied_copies: frozenset[int]
    """Ids of this rank's parameters that are clipped, but whose norm another rank adds."""


def clip_grad_norm_(
    model: nn.Module, max_norm: float | None = None, pipeline: OverStages | None = None
) -> Tensor | None:
    """Clips gradients to ``max_norm`` in place and returns their norm before, shape [].

    None if there is no gradient, since an optimizer in the backward has used and freed them.

    The norm is that of all gradients together, whichever mesh they are sharded over; PyTorch's own
    function takes one mesh only. It is at least fp32, of bf16 gradients, too, whose own norm would have three digits.

    Args:
        model: or the pipeline stages on this rank.
        max_norm: of all gradients together; None measures and changes nothing.
        pipeline: that the stages belong to; None for a model in one piece.
    """
    tied_copies: Container[int] = () if pipeline is None else pipeline.tied_copies
    parameters_by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            parameters_by_mesh[mesh].append(parameter)

    if not parameters_by_mesh and pipeline is None:
        return None
    norms = []
    for group in parameters_by_mesh.values():
        grads = [p.grad for p in group if p.grad is not None and id(p) not in tied_copies]
        norm = _total_norm(grads)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total_norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if pipeline is not None:
        size = dist.get_world_size(pipeline.group)
        of_stages = [torch.empty_like(total_norm) for _ in range(size)]
        dist.all_gather(of_stages, total_norm, group=pipeline.group)
        total_norm = torch.linalg.vector_norm(torch.stack(of_stages))

    if max_norm is not None and max_norm != float("inf"):
        for group in parameters_by_mesh.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, total_norm)
    return total_norm


def _total_norm(grads: list[Tensor]) -> Tensor:
    """The norm of tensors together, [], at least fp32; a DTensor where they are."""
    if all(grad.dtype.itemsize >= torch.float32.itemsize for grad in grads):
        return nn.utils.get_total_norm(grads)
    if isinstance(
        grads[0], DTensor
    ):  # one by one: torch 2.14 cannot shard the foreach with a dtype
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    else:
        norms = list(torch._foreach_norm(grads, 2.0, dtype=torch.float32))
    # get_total_norm, but for the dtype that squares are summed in.
    return torch.linalg.vector_norm(torch.stack(norms))
