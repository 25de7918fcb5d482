"""Keeps the documents of a packed row apart where transformers does not: in every mask, or module by module.

In prefix-shared pairs neither answer attends to the other, and both continue the positions of the prefix.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    remap_positions_for_packed_sequence,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from recipe_utils.data.text.documents import Documents, segment_lengths
from recipe_utils.model.attention.block_mask import sees


class Exchange(NamedTuple):
    """Functions of :mod:`recipe_utils.model.attention.rows_over_ranks` between the ranks of a row."""

    heads_of_row: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    tokens_of_part: Callable[[Tensor], Tensor]


Rows = tuple[Documents | None, Tensor | None, Exchange | None]
_rows: ContextVar[Rows] = ContextVar("rows")
"""Documents and positions [b, s] of the rows in the forward, and the exchange between ranks that compute
one together; None where documents need no help.

Without a default: outside of a forward documents are unknown, not absent.
"""


@contextmanager
def documents_of(
    documents: Documents | None, positions: Tensor | None, exchange: Exchange | None = None
) -> Iterator[None]:
    """Sets documents and positions [b, s] of the rows, or parts of rows, that a forward computes in this block."""
    token = _rows.set((documents, positions, exchange))
    try:
        yield
    finally:
        _rows.reset(token)


def current_documents() -> Rows:
    """Returns the arguments of :func:`documents_of` for the forward that computes now."""
    return _rows.get()


def masked_by_document(attention: str, splits: bool) -> str:
    """Returns the name of an attention like ``attention`` whose masks keep documents apart.

    transformers calls the mask function of an attention for each kind of mask that a model makes, so
    windows and chunks stay as they are. Those of prefix-shared pairs are of positions, since a row has the
    chosen answer between the prefix and the rejected one. With ``splits``, ``sdpa`` attends within one
    document after the other, which takes less time than a mask [s, s].
    """
    if attention == "eager":  # models look for their own function by this name
        AttentionMaskInterface.register(attention, partial(_mask, _EAGER, splits=False))
        return attention
    name = f"{attention}_{'split' if splits else 'masked'}_by_document"
    make_mask = partial(_mask, ALL_MASK_ATTENTION_FUNCTIONS[attention], splits=splits)
    attend = ALL_ATTENTION_FUNCTIONS[attention]
    if splits:  # compiled, it would be compiled again for each length
        attend = torch.compiler.disable(_attend_within_documents)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
    return name


_EAGER = ALL_MASK_ATTENTION_FUNCTIONS["eager"]


def _mask(
    make_mask: Any,
    *,
    splits: bool,
    mask_function: Any,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Any:
    documents, positions, exchange = _rows.get((None, None, None))
    if documents is not None:
        is_split = splits and documents.segments is None
        if is_split and mask_function is causal_mask_function:
            return None
        if exchange is not None:
            raise ValueError("only a causal mask is that of a whole row on each of its ranks")
        if is_split or documents.segments is not None:
            mask_function = remap_positions_for_packed_sequence(mask_function, positions)
            kwargs["attention_mask"] = None  # all ones, see Decoder.forward
        if not is_split:
            mask_function = and_masks(sees(documents), mask_function)
        allow_is_causal_skip = False
    return make_mask(
        mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **kwargs
    )


def _attend_within_documents(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attends within documents, for queries [b, h, s, d] and a mask [b, h, s, s]; see transformers' ``sdpa``."""
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    documents, positions, exchange = _rows.get((None, None, None))
    if exchange is not None:
        q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
        q, k, v = (e.transpose(0, 1).unsqueeze(0) for e in exchange.heads_of_row(q, k, v))
        with documents_of(documents, positions):
            attended, _ = _attend_within_documents(module, q, k, v, mask, **kwargs)
        return exchange.tokens_of_part(attended.squeeze(0)).unsqueeze(0), None
    if documents is None or documents.segments is not None:
        return attend(module, query, key, value, mask, **kwargs)
    if kwargs.get("position_bias") is not None:
        raise ValueError("a bias of positions is not split")
    (row,) = documents
    lengths = segment_lengths(row)
    parts = zip(*(each.split(lengths, dim=2) for each in (query, key, value)), strict=True)
    outputs, start = [], 0
    for length, part in zip(lengths, parts, strict=True):
        own = slice(start, start + length)
        of_part = None if mask is None else mask[:, :, own, own]
        outputs.append(attend(module, *part, of_part, **kwargs)[0])
        start += length
    return torch.cat(outputs, dim=1), None


Axes = dict[int, list[int]]
"""Number of a tensor's dimensions -> those of positions."""


def run_by_document(module: nn.Module, axes: Axes, learns: bool) -> None:
    """Makes a module compute one document after the other, in place.

    Exact for whatever mixes positions, at the price of one call for each document. Tensors are cut
    along ``axes`` and joined again. A row can be as long as the model is wide, so the axes cannot be
    told by their sizes: the proof, whose row has a length of its own, learns them. Raises RuntimeError
    where documents are unknown, as in a recomputation without those of its forward.
    """
    whole = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if (rows := _rows.get(None)) is None:
            raise RuntimeError(
                f"{type(module).__name__} runs by document, and documents are unknown"
            )
        if rows[0] is None or len(rows[0].boundaries) < 3:
            return whole(*args, **kwargs)
        (row,) = rows[0]
        lengths = segment_lengths(row)
        parts, start, num_positions = [], 0, sum(lengths)
        if learns:
            _learn(axes, (args, kwargs), num_positions)
        for length in lengths:
            cut = partial(_cut, axes=axes, num_positions=num_positions, start=start, length=length)
            parts.append(whole(*cut(args), **cut(kwargs)))
            start += length
        return _join(parts, axes)

    # Compiled, it would be compiled again for each length.
    module.forward = torch.compiler.disable(forward)


def _learn(axes: Axes, value: Any, num_positions: int) -> None:
    if isinstance(value, Tensor):
        found = [axis for axis, size in enumerate(value.shape) if size == num_positions]
        if found and axes.setdefault(value.dim(), found) != found:
            raise ValueError(f"positions are axes {found} and {axes[value.dim()]}")
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            _learn(axes, each, num_positions)


def _cut(value: Any, axes: Axes, num_positions: int, start: int, length: int) -> Any:
    cut = partial(_cut, axes=axes, num_positions=num_positions, start=start, length=length)
    if isinstance(value, Tensor):
        own = axes.get(value.dim(), [])
        if all(value.shape[axis] == num_positions for axis in own):
            for axis in own:
                value = value.narrow(axis, start, length)
        return value
    if isinstance(value, (list, tuple)):
        parts = map(cut, value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: cut(each) for key, each in value.items()}
    return value


def _join(parts: Sequence[Any], axes: Axes) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        (axis,) = axes[first.dim()]
        return torch.cat(list(parts), dim=axis)
    if isinstance(first, (list, tuple)):
        return type(first)(_join(each, axes) for each in zip(*parts, strict=True))
    return first
