"""Norm of all gradients together, and clipping.

Example: gradients of norm 3 are sharded with FSDP2, others of norm 4 also with tensor parallelism, on another mesh.
The norm of all is 5; with ``max_norm`` 1 both are divided by 5. Clipped mesh by mesh, as PyTorch's function would, they
would be divided by 3 and by 4, and the gradient would point elsewhere.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import record_function


class OverStages(Protocol):
    """Attributes of a pipeline that a norm over its stages uses."""

    group: dist.ProcessGroup
    """Ranks of the pipeline."""
    tied_copies: frozenset[int]
    """Ids of parameters on this rank whose norm another rank adds."""


@record_function("clip")
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float | None = None,
    pipeline: OverStages | None = None,
    is_of_part: Callable[[str], bool] | None = None,
) -> Tensor | None:
    """Clips gradients in place. Returns their norm before clipping [], None without gradients.

    They may be sharded over several meshes; PyTorch's own function takes one. The norm is at least
    fp32: a bf16 norm would have three digits. ``max_norm`` None only measures it; ``model`` may be
    the stages of ``pipeline`` on this rank; ``is_of_part`` selects parameters by name.
    """
    tied_copies: Container[int] = () if pipeline is None else pipeline.tied_copies
    parameters_by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and (is_of_part is None or is_of_part(name)):
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            parameters_by_mesh[mesh].append(parameter)

    # The norm of the norms of the meshes, and over the stages of a pipeline.
    if not parameters_by_mesh and pipeline is None:
        return None
    norms = []
    for group in parameters_by_mesh.values():
        grads = [p.grad for p in group if p.grad is not None and id(p) not in tied_copies]
        norm = _total_norm(grads)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if norms:
        total_norm = torch.linalg.vector_norm(torch.stack(norms))
    else:  # a stage without gradients, with precision and device of the others' norms
        like = next(model.parameters())
        total_norm = torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    if pipeline is not None:
        stage_norms = [torch.empty_like(total_norm) for _ in range(dist.get_world_size(pipeline.group))]
        dist.all_gather(stage_norms, total_norm, group=pipeline.group)
        total_norm = torch.linalg.vector_norm(torch.stack(stage_norms))

    # By the norm of all, so that the direction stays.
    if max_norm is not None and max_norm != float("inf"):
        for group in parameters_by_mesh.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, total_norm)
    return total_norm


def clip_grad_norm_by_part_(
    model: nn.Module, parts: Sequence[str], max_norm: float | None = None, pipeline: OverStages | None = None
) -> Tensor | None:
    """Clips the gradients of each part of a model. Returns the norm of all before clipping [].

    ``parts`` are names of modules; everything else is one more part. See :func:`clip_grad_norm_`.
    """

    def part_of(name: str) -> str | None:
        return next((part for part in parts if f".{part}." in f".{name}"), None)

    norms = [
        clip_grad_norm_(model, max_norm, pipeline, lambda name, part=part: part_of(name) == part)  # type: ignore[misc]
        for part in (None, *parts)
    ]
    known = [norm for norm in norms if norm is not None]
    return torch.linalg.vector_norm(torch.stack(known)) if known else None


def _total_norm(grads: list[Tensor]) -> Tensor:
    """Returns the norm of tensors together [], at least fp32; a DTensor for DTensors."""
    if all(grad.dtype.itemsize >= torch.float32.itemsize for grad in grads):
        return nn.utils.get_total_norm(grads)
    # One by one: torch 2.14 cannot shard the foreach with a dtype.
    if isinstance(grads[0], DTensor):
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    else:
        norms = list(torch._foreach_norm(grads, 2.0, dtype=torch.float32))
    # As get_total_norm, but squares are summed in fp32.
    return torch.linalg.vector_norm(torch.stack(norms))
