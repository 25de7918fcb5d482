"""Attention within the documents of packed rows: one dispatch over all kernels, for both libraries.

Example: a row of 19 positions has documents of 5, 3, 9 and 2, and two ranks compute it. Each rank has queries and keys
of 8 heads at 10 positions (one is padding). They exchange them for 4 heads at all 20 positions, FlashAttention computes
the four documents, and the outputs are exchanged for 8 heads at the rank's own 10 positions again.

Shapes: b rows, s positions per row, h query heads, g heads of keys and values, d head width.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from recipe_utils.models.attention.chains import MergedAttention, can_merge, parts_of_chains
from recipe_utils.models.attention.exchange import Exchange
from recipe_utils.text.documents import Documents
from recipe_utils.text.limits import Kernel


class Window(NamedTuple):
    """Mask of a sliding window, in place of a tensor [b, 1, s, s]."""

    length: int
    """Positions that a query attends to, its own included."""


Mask: TypeAlias = BlockMask | Window | Tensor | None
"""Mask of flex attention, of a window, or [b or 1, 1, s, s]; None is causal."""
OwnAttention = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""Attention of a model: q [b, h, s, d], k, v [b, g, s, d] and a mask -> [b, s, h, d]."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Packed rows of a forward, and how their attention is computed."""

    documents: Documents
    kernel: Kernel
    exchange: Exchange | None = None
    """Set if ranks compute a row together."""
    mask: BlockMask | None = None
    """Mask of all layers. Models of transformers make one for each kind of layer instead."""
    positions: Tensor | None = None
    """[b, s], restarting with each document."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: PackedRows,
    mask: Mask = None,
    own: OwnAttention | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Computes attention of q [b, h, s, d] to k and v [b, g, s, d] within documents; returns [b, s, h, d].

    ``mask`` is by default that of ``rows``. ``own`` is a model's attention, which computes block masks and, chain by
    chain, masks [1, 1, n, m] or None (causal). By default it is PyTorch's with ``dropout_p``, of keys that are copied
    to the heads that share them. ``scale`` is the factor of FlashAttention's scores, d**-0.5 if None.
    """
    mask = rows.mask if mask is None else mask
    # A share of a row: this rank computes the whole row for some of the heads.
    if rows.exchange is not None:
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (q, k, v))
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in rows.exchange.heads_of_row(q, k, v))
    # One kernel for all documents, or else one for each. Only FlashAttention reads shared keys in place.
    if own is None and rows.kernel != "varlen" and q.size(1) != k.size(1):
        k, v = (tensor.repeat_interleave(q.size(1) // k.size(1), dim=1) for tensor in (k, v))
    if isinstance(mask, BlockMask):
        attended = (own or _by_blocks)(q, k, v, mask)
    elif rows.kernel == "varlen":
        # Flat before the break of a compiled graph, which then writes q, k and v as the kernel reads them.
        flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v)]  # [b * s, h or g, d]
        attended = by_varlen(*flat, rows.documents, mask, scale).unflatten(0, (len(q), -1))
    else:
        attended = by_document(q, k, v, rows.documents, mask, own, dropout_p)
    if rows.exchange is not None:
        attended = rows.exchange.tokens_of_part(attended.squeeze(0)).unsqueeze(0)
    return attended


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: Any, scale: float | None) -> Tensor:
    """Computes [n, h, d] of q [n, h, d] and k, v [n, g, d] by FlashAttention over all documents; see :func:`attend`."""
    # A local import, because it takes 0.3 seconds and is not needed on a CPU.
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn
    # Causal within each document; the kernel counts the positions before a query.
    options: dict[str, Any] = {"window_size": (-1 if window is None else window.length - 1, 0)}
    if scale is not None:
        options["scale"] = scale
    if q.size(1) != k.size(1):
        if _shares_keys(varlen_attn):
            options["enable_gqa"] = True
        else:
            k, v = (tensor.repeat_interleave(q.size(1) // k.size(1), dim=1) for tensor in (k, v))
    bounds = (documents.cu_seqlens, documents.cu_seqlens, documents.max_seqlen, documents.max_seqlen)
    attended: Tensor = varlen_attn(q, k, v, *bounds, **options)
    return attended


@cache
def _shares_keys(varlen_attn: Callable[..., Any]) -> bool:
    return "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch >= 2.12


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _by_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Applies flex attention to q, k, v [b, h, s, d]. Always compiled: uncompiled it stores all scores."""
    attended = compile_flex_attention()(q, k, v, block_mask=mask)
    return attended.transpose(1, 2)


@cache
def compile_flex_attention(backend: Any = "inductor") -> Callable[..., Tensor]:
    """Returns compiled flex attention; it recompiles for each shape, and for training and validation."""
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False, backend=backend)
    return compiled


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_document(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask, own: OwnAttention | None, dropout_p: float
) -> Tensor:
    """Computes [b, s, h, d] chain by chain, each behind its ancestors; a plain document is one chain."""
    window = mask.length if isinstance(mask, Window) else None
    attend_to_chain = own or partial(_by_pytorch, dropout_p)
    rows = []
    by_row = zip(documents, q.split(1), k.split(1), v.split(1), strict=True)
    for index, (row, q_row, k_row, v_row) in enumerate(by_row):
        # PyTorch's kernel for a CPU attends to ancestors without a mask.
        has_trees = not all(isinstance(document, int) for document in row)
        if own is None and has_trees and can_merge(q, v, dropout_p):
            rows.append(MergedAttention.apply(q_row, k_row, v_row, row).transpose(1, 2))
            continue
        row_mask = mask[index % len(mask), None] if isinstance(mask, Tensor) else None
        attended = [attend_to_chain(*part) for part in parts_of_chains(row, q_row, k_row, v_row, row_mask, window)]
        # Concatenated as [b, s, h, d], the layout that the caller needs next.
        rows.append(torch.cat(attended, dim=1))
    return torch.cat(rows)


def _by_pytorch(dropout_p: float, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=mask is None).transpose(1, 2)
