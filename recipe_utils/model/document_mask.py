"""Attention within documents: a token of a packed row sees what precedes it in its own document.

A document may have two ends, the answers of a pair: the tokens of both see what they share, and no end sees
the other.

Shapes: b rows, s slots per row, h heads, d head width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torchtune.modules import MultiHeadAttention, TransformerSelfAttentionLayer
from torchtune.modules.attention_utils import create_block_causal_mask, packed_block_causal_mask

from recipe_utils.data.microbatch import DocumentLengths


class DocumentMask:
    """Stands in for a mask [b, s, s] where attention goes document by document.

    No tuple or dataclass: torch.compile would look into it and compile again for other lengths.
    """

    def __init__(self, lengths: DocumentLengths) -> None:
        self.lengths = lengths


def other_attention(model: nn.Module) -> str | None:
    """The kind of self-attention that keeps ``model`` from :class:`DocumentMask`; None if none does."""
    attentions = _self_attentions(model)
    others = [
        type(module).__name__ for module in attentions if type(module) is not MultiHeadAttention
    ]
    if not attentions:
        return type(model).__name__
    return others[0] if others else None


def attend_within_documents(model: nn.Module, device: torch.device, max_row_length: int) -> None:
    """Makes ``model(..., document_lengths=lengths)`` attend within documents only.

    On a CPU, document by document: no work and no memory for what a mask would hide. On CUDA through
    a block mask for flex attention, which is compiled for each row length that it meets. Other
    models (:func:`other_attention`) get a dense mask [b, s, s], without documents of two ends.

    Args:
        model: a torchtune decoder, or a fusion model with one at ``decoder``; before it is wrapped.
        device: of the microbatches.
        max_row_length: longest row to come [tokens]. A decoder refuses rows above its ``max_seq_len``;
            positions restart with each document, so only documents must keep to that.
    """
    make_mask: Callable[[DocumentLengths], Any]
    if other_attention(model) is not None:
        make_mask = partial(_dense_mask, device=device)
    elif device.type == "cuda":
        make_mask = _flex_mask
    else:
        make_mask = DocumentMask
        for attention in _self_attentions(model):
            attention._attention_call = _within_documents(attention._attention_call)

    decoder: Any = getattr(model, "decoder", model)
    decoder.longest_document = decoder.max_seq_len  # where its positions end
    decoder.max_seq_len = max(decoder.max_seq_len, max_row_length)

    def lengths_to_mask(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "document_lengths" in kwargs:
            kwargs["mask"] = make_mask(kwargs.pop("document_lengths"))
        return args, kwargs

    model.register_forward_pre_hook(lengths_to_mask, with_kwargs=True)


def _self_attentions(model: nn.Module) -> list[Any]:
    layers = (m for m in model.modules() if isinstance(m, TransformerSelfAttentionLayer))
    return [layer.attn for layer in layers]


def _dense_mask(lengths: DocumentLengths, device: torch.device) -> Tensor:
    return create_block_causal_mask([torch.tensor(row, device=device) for row in lengths])


def _flex_mask(lengths: DocumentLengths) -> Any:
    if any(isinstance(document, tuple) for row in lengths for document in row):
        device = torch.device("cuda", torch.cuda.current_device())
        size = sum(_parts(lengths[0]))
        return create_block_mask(ends_mask(lengths, device), len(lengths), None, size, size, device)
    most = max(len(row) for row in lengths)
    # A document of no tokens changes nothing, and torchtune wants equally many in each row.
    return packed_block_causal_mask(
        [torch.tensor([*row, *[0] * (most - len(row))]) for row in lengths]
    )


def ends_mask(lengths: DocumentLengths, device: torch.device) -> Callable[..., Tensor]:
    """What flex attention calls ``mask_mod``: whether a query sees a key.

    It does if the key is not after it, in its own document, and shared or of its own end.
    """
    documents, ends = [], []
    for row in lengths:
        parts = [document if isinstance(document, tuple) else (document,) for document in row]
        in_row = [torch.full((sum(of),), index) for index, of in enumerate(parts)]
        documents.append(torch.cat(in_row).to(device))
        of_row = [torch.full((n,), end) for of in parts for end, n in enumerate(of)]
        ends.append(torch.cat(of_row).to(device))
    document_of, end_of = torch.stack(documents), torch.stack(ends)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        is_shared_or_own = (end_of[b, k] == 0) | (end_of[b, k] == end_of[b, q])
        return (k <= q) & (document_of[b, k] == document_of[b, q]) & is_shared_or_own

    return mask_mod


def _parts(row: Any) -> list[int]:
    """Tokens of each document, and of each part of one with two ends."""
    return list(chain.from_iterable(d if isinstance(d, tuple) else (d,) for d in row))


def _within_documents(attention_call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``attention_call`` for anything but a :class:`DocumentMask`."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout_p: float, is_causal: bool
    ) -> Tensor:
        if isinstance(mask, DocumentMask):
            return _attend(q, k, v, mask, dropout_p)
        return attention_call(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)

    return call


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask, dropout_p: float) -> Tensor:
    """Takes q, k, v [b, h, s, d] -> [b, h, s, d]."""
    rows = []
    for lengths, *row in zip(mask.lengths, q.split(1), k.split(1), v.split(1), strict=True):
        # split and cat: the backward of a slice would fill the gradient of the whole row each time.
        parts = zip(*(tensor.split(_parts(lengths), dim=2) for tensor in row), strict=True)
        attended = []
        for document in lengths:
            if isinstance(document, tuple):
                attended += _attend_with_two_ends(next(parts), next(parts), next(parts), dropout_p)
            else:
                q, k, v = next(parts)
                attended.append(_attend_causally(q, k, v, dropout_p))
        # In the layout [b, s, h, d], which the caller wants next.
        rows.append(torch.cat([part.transpose(1, 2) for part in attended], dim=1))
    return torch.cat(rows).transpose(1, 2)


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)


def _attend_with_two_ends(
    shared: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], dropout_p: float
) -> list[Tensor]:
    """Takes q, k and v of each part. What is shared is computed with the first end, in one causal call."""
    q, k, v = (torch.cat(parts, dim=2) for parts in zip(shared, first, strict=True))
    of_shared_and_first = _attend_causally(q, k, v, dropout_p)
    q = second[0]
    k, v = (torch.cat(parts, dim=2) for parts in zip(shared[1:], second[1:], strict=True))
    sees = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device)
    sees = sees.tril(k.size(2) - q.size(2))
    of_second = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, dropout_p=dropout_p)
    return [of_shared_and_first, of_second]
