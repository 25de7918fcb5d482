"""Attention of a row whose parts are on several ranks: all tokens of some heads instead of some tokens of all.

After Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv:2309.14509), with a group of ranks for each row
instead of one for all. Everything but attention is computed token by token, each on one rank.

Shapes: s tokens of a part, c ranks of the row, h query heads, g heads of keys, d width of a head.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_utils.parallel.exchange import all_to_all


class PartMask:
    """Mask of a whole row, and the ranks that compute it.

    Neither a tuple nor a dataclass, which FSDP2 would convert.
    """

    def __init__(self, of_row: Any, group: dist.ProcessGroup) -> None:
        self.of_row = of_row
        self.group = group


def heads_of_row(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges the tokens of this rank's part for heads of the whole row, in one collective.

    Takes q [s, h, d], k and v [s, g, d]; returns [c * s, h / c, d] and twice [c * s, g' / c, d]. The
    number of ranks divides h; if it does not divide g, keys and values are repeated to g' = c heads,
    or h. Values may have another width than keys.
    """
    c = dist.get_world_size(group)
    num_heads, num_keys = q.size(1), k.size(1)
    if num_keys % c:
        times = (num_heads if c % num_keys else c) // num_keys
        k, v = (each.repeat_interleave(times, dim=1) for each in (k, v))
    parts = [each.reshape(len(q), c, -1) for each in (q, k, v)]
    received = all_to_all(torch.cat(parts, dim=2).transpose(0, 1), group)  # [c, s, heads of a rank]
    row = received.transpose(0, 1).flatten(0, 1)  # token i of the row is on rank i % c
    of_row = row.split([part.size(2) for part in parts], dim=1)
    q, k, v = (
        own.unflatten(1, (-1, each.size(2))) for own, each in zip(of_row, (q, k, v), strict=True)
    )
    return q, k, v


def tokens_of_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges heads of the whole row [c * s, h / c, d] for all heads of this rank's part [s, h, d]."""
    c = dist.get_world_size(group)
    received = all_to_all(x.unflatten(0, (-1, c)).transpose(0, 1), group)  # [c, s, h / c, d]
    return received.transpose(0, 1).flatten(1, 2)
