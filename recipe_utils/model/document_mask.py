"""Attention within documents: a token of a packed row sees what precedes it in its own document.

Shapes: b rows, s slots per row, h heads, d head width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import MultiHeadAttention, TransformerSelfAttentionLayer
from torchtune.modules.attention_utils import create_block_causal_mask, packed_block_causal_mask

DocumentLengths = Sequence[Sequence[int]]
"""Tokens of each document, for each row."""


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
    torchtune's block mask for flex attention, which is compiled for each row length that it meets. Other
    models (:func:`other_attention`) get a dense mask [b, s, s].

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
    most = max(len(row) for row in lengths)
    # A document of no tokens changes nothing, and torchtune wants equally many in each row.
    return packed_block_causal_mask(
        [torch.tensor([*row, *[0] * (most - len(row))]) for row in lengths]
    )


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
        documents = zip(*(tensor.split(list(lengths), dim=2) for tensor in row), strict=True)
        attended = [
            F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
            for q, k, v in documents
        ]
        # In the layout [b, s, h, d], which the caller wants next.
        rows.append(torch.cat([part.transpose(1, 2) for part in attended], dim=1))
    return torch.cat(rows).transpose(1, 2)
