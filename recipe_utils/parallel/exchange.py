"""Collectives with a gradient, among the ranks that compute a row together.

Shapes: c ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RowGroups = Mapping[int, dist.ProcessGroup]
"""Number of ranks -> this rank's group of so many."""


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None  # its own transpose


@torch.compiler.disable  # type: ignore[untyped-decorator]
def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns [c, ...] with entry r from rank r, for ``x`` [c, ...] with entry r for rank r."""
    received: Tensor = _AllToAll.apply(x, group)
    return received
