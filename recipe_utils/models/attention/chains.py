"""Queries, keys and values of a row's chains of segments, and their attention on a CPU.

Example: a prompt of 2 tokens with answers of 3 and 4 has two chains. The first is prompt and first answer, positions 0
to 4: plain causal attention. The second is the other answer, positions 5 to 8, behind the ancestors 0 and 1: its 4
queries attend to 6 keys, and the mask [4, 6] is causal in the last 4.

Shapes: b rows, h heads, s positions of a row, n of a chain, m of a chain and its ancestors, d head width.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from recipe_utils.text.documents import Document, chains, spans

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def parts_of_chains(
    row: Sequence[Document], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, window: int | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yields queries [b, h, n, d] of each chain, keys and values [b, h, m, d], and its mask.

    Masks are parts [b, h, n, m] of ``mask`` [b, h, s, s], or else :func:`mask_of_chain` with a ``window``.
    """
    row_chains, segments = list(chains(row)), list(spans(row))
    starts = [start for start, *_ in segments]
    # split and cat, because the backward of a slice fills a gradient of the whole row.
    queries = q.split([chain.stop - chain.start for chain in row_chains], dim=2)
    keys, values = (tensor.split([stop - start for start, stop, _ in segments], dim=2) for tensor in (k, v))
    for chain, chain_queries in zip(row_chains, queries, strict=True):
        # The segments of the ancestors and of the chain itself, by their numbers in the row.
        bounds = [(bisect_left(starts, low), bisect_left(starts, high)) for low, high in chain.ranges]
        seen = [index for bound in bounds for index in range(*bound)]
        chain_keys, chain_values = (
            parts[seen[0]] if len(seen) == 1 else torch.cat([parts[i] for i in seen], dim=2) for parts in (keys, values)
        )
        if mask is None:
            chain_mask = mask_of_chain(chain_queries, chain_keys, window)
        else:
            rows = mask[:, :, chain.start : chain.stop]
            chain_mask = torch.cat([rows[..., low:high] for low, high in chain.ranges], dim=3)
        yield chain_queries, chain_keys, chain_values, chain_mask


def mask_of_chain(q: Tensor, k: Tensor, window: int | None = None) -> Tensor | None:
    """Returns the causal mask [1, 1, n, m] of a chain; with a ``window`` of so many positions.

    None if the chain has no ancestors and fits in the window: attention has a causal mask of its own.
    """
    n, m = q.size(2), k.size(2)
    window = min(window or m, m)
    if n == m == window:
        return None
    seen = torch.ones(1, 1, n, m, dtype=torch.bool, device=q.device).tril(m - n)
    return seen if window == m else seen.triu(m - n + 1 - window)


class MergedAttention(torch.autograd.Function):
    """Attention of each chain to its ancestors and to itself, merged by log-sum-exp, on a CPU.

    Keeps q, k, v, the output [b, h, s, d] and its log-sum-exps [b, h, s], but no mask and no copies of the ancestors'
    keys. The backward of a part takes the merged log-sum-exp, as in ring attention (https://arxiv.org/abs/2310.01889).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, row: Sequence[Document]) -> Tensor:
        """Returns the output [b, h, s, d] of a row."""
        ctx.chains = list(chains(row))
        outs, lses = [], []
        for chain in ctx.chains:
            queries = q[:, :, chain.start : chain.stop]
            chain_keys, *ancestor_keys = (_part(k, v, positions) for positions in reversed(chain.ranges))
            # Causal in the chain itself; every query attends to all of its ancestors.
            out, lse = _flash(queries, *chain_keys, 0.0, True)
            for keys_and_values in ancestor_keys:
                # Two softmaxes over parts of the keys are one over all, weighted by their shares of its sum.
                part_out, part_lse = _flash(queries, *keys_and_values, 0.0, False)
                merged = torch.logaddexp(lse, part_lse)
                share, part_share = ((part - merged).exp().unsqueeze(3) for part in (lse, part_lse))
                out = out * share + part_out * part_share
                lse = merged
            outs.append(out.transpose(1, 2))
            lses.append(lse)
        out = torch.cat(outs, dim=1).transpose(1, 2)  # [b, s, h, d], the layout that comes next
        ctx.save_for_backward(q, k, v, out, torch.cat(lses, dim=2))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Returns the gradients of q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = map(torch.zeros_like, (q, k, v))
        for chain in ctx.chains:
            queries = slice(chain.start, chain.stop)
            for low, high in chain.ranges:
                parts = _flash_backward(
                    grad[:, :, queries], q[:, :, queries], *_part(k, v, (low, high)), out[:, :, queries],
                    lse[:, :, queries], 0.0, low == chain.start,
                )  # fmt: skip
                grad_q[:, :, queries] += parts[0]
                grad_k[:, :, low:high] += parts[1]
                grad_v[:, :, low:high] += parts[2]
        return grad_q, grad_k, grad_v, None


def can_merge(q: Tensor, v: Tensor, dropout_p: float) -> bool:
    """Returns True if :class:`MergedAttention` computes q and v [b, h, s, d]; bf16 would round its parts."""
    is_exact = q.dtype in (torch.float32, torch.float64)
    return q.device.type == "cpu" and is_exact and not dropout_p and q.size(3) == v.size(3)


def _part(k: Tensor, v: Tensor, positions: tuple[int, int]) -> tuple[Tensor, Tensor]:
    low, high = positions
    return k[:, :, low:high], v[:, :, low:high]
