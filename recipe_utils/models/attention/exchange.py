"""Attention of a row whose shares are on several ranks: all tokens of some heads instead of some tokens of all.

After Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv:2309.14509), with a group of ranks for each row
instead of one for all. Everything but attention is computed token by token, each on one rank.

Shapes: s tokens of a share, c ranks of the row, h query heads, g heads of keys, d width of a head.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_utils.parallel.ranks import Ranks


class Exchange(NamedTuple):
    """Exchange between the ranks of a row: :func:`heads_of_row`, and :func:`tokens_of_part` back."""

    heads_of_row: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    tokens_of_part: Callable[[Tensor], Tensor]


RowGroups = Mapping[int, Exchange]
"""Number of ranks -> the exchange with this rank's group of so many, which compute rows together."""


def row_groups(ranks: Ranks, max_ranks: int) -> RowGroups:
    """Returns the groups of 2, 4, ..., ``max_ranks`` neighboring data-parallel ranks.

    Collective; call it once.
    """
    groups = {1 << i: ranks.new_subgroup(1 << i) for i in range(1, max_ranks.bit_length())}
    return {n: Exchange(partial(heads_of_row, group=g), partial(tokens_of_part, group=g)) for n, g in groups.items()}


def heads_of_row(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges the tokens of this rank's share for heads of the whole row, in one collective.

    Takes q [s, h, d], k and v [s, g, d]; returns [c * s, h / c, d] and twice [c * s, g' / c, d]. The
    number of ranks divides h; if it does not divide g, keys and values are repeated to g' = c heads,
    or h. Values may have another width than keys.
    """
    c = dist.get_world_size(group)
    num_heads, num_keys = q.size(1), k.size(1)
    if num_keys % c:
        times = (num_heads if c % num_keys else c) // num_keys
        k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    parts = [x.reshape(len(q), c, -1) for x in (q, k, v)]
    # [c, s, heads of a rank]
    received = _all_to_all(torch.cat(parts, dim=2).transpose(0, 1), group)
    row = received.transpose(0, 1).flatten(0, 1)  # token i of the row is on rank i % c
    split = row.split([part.size(2) for part in parts], dim=1)
    q, k, v = (heads.unflatten(1, (-1, x.size(2))) for heads, x in zip(split, (q, k, v), strict=True))
    return q, k, v


def tokens_of_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges heads of the whole row [c * s, h / c, d] for all heads of this rank's share [s, h, d]."""
    c = dist.get_world_size(group)
    received = _all_to_all(x.unflatten(0, (-1, c)).transpose(0, 1), group)  # [c, s, h / c, d]
    return received.transpose(0, 1).flatten(1, 2)


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
def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns [c, ...] with entry r from rank r, for ``x`` [c, ...] with entry r for rank r."""
    received: Tensor = _AllToAll.apply(x, group)
    return received
