"""Norms of gradients, of all together or by name, and clipping.

Example: gradients of norm 3 are sharded with FSDP2, others of norm 4 also with tensor parallelism, on another mesh.
The norm of all is 5; with ``max_norm`` 1 both are divided by 5. Clipped mesh by mesh, as PyTorch's function would, they
would be divided by 3 and by 4, and the gradient would point elsewhere.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from recipe_utils.optim.optimizer import trained_parameters, unwrapped

NameOf = Callable[[str], str | None]
"""Maps a parameter's name in checkpoints to that of a norm; None takes part in none."""


class ModelWithGradients(Protocol):
    """What norms of gradients read of a model, which may be cut into stages on several ranks."""

    module: nn.Module
    """The model, or this rank's stages of it."""
    is_cut: bool
    """True for stages, of which one may have no gradients."""
    tied_copies: frozenset[int]
    """Ids of parameters on this rank whose norm another rank adds."""

    @property
    def trained_names(self) -> Sequence[str]:
        """Names of the trained parameters of all stages."""

    def norms_over_stages(self, norms: Tensor) -> Tensor:
        """Returns norms [n] of all stages, from those of this rank's."""


@record_function("clip")
def clip_grad_norm_(
    model: ModelWithGradients, max_norm: float | None = None, name_of: NameOf | None = None
) -> Tensor | None:
    """Clips gradients in place. Returns their norm before clipping [], None without gradients.

    They may be sharded over several meshes; PyTorch's own function takes one. The norm is at least
    fp32: a bf16 norm would have three digits. ``max_norm`` None only measures it. With ``name_of``, those of each name
    are clipped by their own norm.
    """
    if not model.is_cut and all(parameter.grad is None for parameter in model.module.parameters()):
        return None
    norms, parameters = _norms(model, name_of)
    # By the norm of all of a name, so that the direction stays.
    if max_norm is not None and max_norm != float("inf"):
        for (name, _), group in parameters.items():
            nn.utils.clip_grads_with_norm_(group, max_norm, norms[name])
    return torch.linalg.vector_norm(torch.stack([*norms.values()])) if len(norms) > 1 else norms.popitem()[1]


def grad_norms(model: ModelWithGradients, name_of: NameOf) -> dict[str, Tensor]:
    """Returns the norm [] of the gradients of each name, equal on all ranks, without a device synchronization.

    Example: with ``lambda name: "norm/attn" if ".attn." in name else None``, the norm of all attention layers. Without
    gradients a norm is 0. Raises ValueError if ``name_of`` selects no trained parameter of the whole model, or there
    are no gradients at all.
    """
    if not model.is_cut and all(parameter.grad is None for parameter in model.module.parameters()):
        raise ValueError("no parameter has a gradient; measure norms before zero_grad, and without optimizer_in_bwd")
    return _norms(model, name_of)[0]


def _norms(
    model: ModelWithGradients, name_of: NameOf | None
) -> tuple[dict[str, Tensor], dict[tuple[str, DeviceMesh | None], list[nn.Parameter]]]:
    """Returns norms by name, and parameters with gradients on this rank by name and mesh."""
    trained, names = trained_parameters(model.module), [""]
    if name_of is not None:
        of_all = model.trained_names
        names = [name for name in dict.fromkeys(map(name_of, of_all)) if name is not None]
        if not names:
            examples = ", ".join(of_all[:: max(len(of_all) // 4, 1)])
            raise ValueError(
                f"name_of selects none of the {len(of_all)} trained parameters, which are called {examples}"
            )
    parameters: dict[tuple[str, DeviceMesh | None], list[nn.Parameter]] = defaultdict(list)
    for full_name, parameter in trained.items():
        name = "" if name_of is None else name_of(unwrapped(full_name))
        if parameter.grad is not None and name is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            parameters[name, mesh].append(parameter)

    # The norm of the norms of the meshes, and over the stages of a pipeline.
    of_meshes: dict[str, list[Tensor]] = {name: [] for name in names}
    for (name, _), group in parameters.items():
        if grads := [p.grad for p in group if p.grad is not None and id(p) not in model.tied_copies]:
            norm = _total_norm(grads)
            of_meshes[name].append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    # Without gradients here, with precision and device of the others' norms.
    like = next(model.module.parameters())
    zero = torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    norms = {name: torch.linalg.vector_norm(torch.stack(each or [zero])) for name, each in of_meshes.items()}
    over_stages = model.norms_over_stages(torch.stack([*norms.values()]))
    return dict(zip(names, over_stages, strict=True)), parameters


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
