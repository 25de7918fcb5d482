"""Keeps the documents of packed rows apart in models of transformers: in their attention, or module by module.

Documents are passed beside the forward, never inferred from positions. Trees are computed chain by chain,
each behind its ancestors; a plain document is one chain.

Shapes: b rows, s positions, h heads, d width of a head.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import keystr, tree_map_with_path
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    remap_positions_for_packed_sequence,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from recipe_utils.models.attention.block_mask import block_mask, sees
from recipe_utils.models.attention.chains import mask_of_chain, parts_of_chains
from recipe_utils.models.attention.document_mask import attend_by_varlen
from recipe_utils.text.documents import Chain, Documents, chains
from recipe_utils.text.limits import Kernel


class Exchange(NamedTuple):
    """Functions of :mod:`recipe_utils.long_rows.exchange` between the ranks of a row."""

    heads_of_row: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    tokens_of_part: Callable[[Tensor], Tensor]


class Rows(NamedTuple):
    """Rows, or parts of rows, of one forward."""

    documents: Documents | None = None
    """None for padded rows."""
    positions: Tensor | None = None
    """[b, s], restarting with each document."""
    exchange: Exchange | None = None
    """Set if ranks compute a row together."""
    kernel: Kernel = "dense"
    calls: set[str | tuple[int, int]] | None = None
    """Collected needs of attention: widths of keys and values, and names such as ``softcap``."""


_rows: ContextVar[Rows] = ContextVar("rows")
"""Rows of the current forward. It has no default: outside of a forward documents are unknown, not absent."""


class Window(NamedTuple):
    """Mask of a sliding window, in place of a tensor [b, 1, s, s]."""

    length: int
    """Positions that a query attends to, its own included."""


@contextmanager
def forward_of(rows: Rows) -> Iterator[None]:
    """Sets the rows that a forward computes in this block."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def current_rows() -> Rows:
    """Returns the rows of the forward that computes now."""
    return _rows.get()


_infer_documents = masking_utils.find_packed_sequence_indices


def _packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
    """Returns None in a forward of :func:`forward_of`, which passes documents.

    transformers treats every restart of positions as a document, and reads a number from the device.
    """
    return None if _rows.get(None) is not None else _infer_documents(position_ids)


masking_utils.find_packed_sequence_indices = _packed_sequence_indices


def attention_within_documents(base: str, can_split: bool) -> str:
    """Registers attention within documents, and returns its name.

    transformers calls the mask function of an attention for each kind of mask that a model makes, so
    windows and chunks stay as they are. ``base`` computes rows without documents: ``sdpa``, or
    ``eager``, the function of the model's own module. Without ``can_split`` it keeps its name, by which
    models find their own attention, and masks [b, 1, s, s] keep documents apart.
    """
    name = f"{base}_within_documents" if can_split else base
    if can_split:
        AttentionInterface.register(name, partial(_attend, base))
    AttentionMaskInterface.register(name, partial(_mask, _MASKS[base]))
    return name


_MASKS = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("eager", "sdpa", "flex_attention")}
_make_window = masking_utils.sliding_window_causal_mask_function


def _window_of_length(length: int) -> Any:
    """Returns the mask function of a sliding window, with its length as an attribute."""
    mask_function: Any = _make_window(length)
    mask_function.window = length
    return mask_function


masking_utils.sliding_window_causal_mask_function = _window_of_length


def _mask(
    make_mask: Any, *, mask_function: Any, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | BlockMask | Window | None:
    documents, positions, exchange, kernel, _ = _rows.get(Rows())
    if documents is None:
        return make_mask(mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **kwargs)
    is_causal = mask_function is causal_mask_function
    window: int | None = getattr(mask_function, "window", None)
    if is_causal or window is not None:
        if kernel == "flex" and (is_causal or documents.ends is None):
            return block_mask(documents, window)
        if kernel not in ("flex", "dense"):
            return None if window is None else Window(window)
    if exchange is not None:
        raise ValueError("only causal masks and windows are those of a whole row on each of its ranks")
    if not is_causal:
        mask_function = remap_positions_for_packed_sequence(mask_function, positions)
    mask_function = and_masks(sees(documents), mask_function)
    make_mask = _MASKS["flex_attention"] if kernel == "flex" else make_mask
    kwargs["attention_mask"] = None
    return make_mask(mask_function=mask_function, allow_is_causal_skip=False, **kwargs)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _attend(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Computes attention of queries [b, h, s, d] as an attention of transformers; returns [b, s, h, d]."""
    documents, _, exchange, kernel, calls = rows = _rows.get(Rows())
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if base == "eager":
        attend = sys.modules[type(module).__module__].eager_attention_forward
    if documents is None:
        return attend(module, query, key, value, mask, **kwargs)
    if calls is not None:
        calls |= {(key.size(-1), value.size(-1))}
        calls |= {name for name in _NOT_IN_FLASH if kwargs.get(name) is not None}
        calls |= {"other masks"} if isinstance(mask, Tensor) else set()
    # A part of a row: this rank computes the whole row for a part of the heads.
    if exchange is not None:
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in exchange.heads_of_row(q, k, v))
        with forward_of(rows._replace(exchange=None)):
            attended, _ = _attend(base, module, q, k, v, mask, **kwargs)
        return exchange.tokens_of_part(attended.squeeze(0)).unsqueeze(0), None
    # One kernel for all documents, or else one for each.
    if isinstance(mask, BlockMask):
        return ALL_ATTENTION_FUNCTIONS["flex_attention"](module, query, key, value, mask, **kwargs)
    if kernel == "dense":
        return attend(module, query, key, value, mask, **kwargs)
    if kernel == "varlen":
        if kwargs.get("dropout"):
            raise ValueError("FlashAttention does not support dropout; set packed_attention=by_document")
        flat = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        attended = attend_by_varlen(*flat, documents, None if mask is None else mask.length, kwargs.get("scaling"))
        return attended.unflatten(0, (len(query), -1)), None
    return _attend_by_document(attend, base, module, query, key, value, mask, documents, kwargs), None


_NOT_IN_FLASH = ("softcap", "s_aux", "position_bias")
"""Arguments of transformers' attention that FlashAttention of PyTorch does not have."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_by_document(
    attend: Any,
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Window | Tensor | None,
    documents: Documents,
    kwargs: dict[str, Any],
) -> Tensor:
    if kwargs.get("position_bias") is not None:
        raise ValueError("a bias of positions is not split")
    rows = []
    for index, (row, q, k, v) in enumerate(zip(documents, query.split(1), key.split(1), value.split(1), strict=True)):
        row_mask = mask[index % len(mask), None] if isinstance(mask, Tensor) else None
        outputs = []
        for *part, chain_mask in parts_of_chains(row, q, k, v, row_mask):
            if not isinstance(mask, Tensor):
                chain_mask = _mask_of_chain(part[0], part[1], mask, base)
            outputs.append(attend(module, *part, chain_mask, **kwargs)[0])
        rows.append(torch.cat(outputs, dim=1))
    return torch.cat(rows)


def _mask_of_chain(query: Tensor, key: Tensor, window: Window | None, base: str) -> Tensor | None:
    """Returns the mask [1, 1, n, m] of one chain; None for SDPA's causal mask."""
    length = window.length if window is not None and window.length < key.size(2) else None
    if base == "sdpa" and length is None and query.size(2) == key.size(2):
        return None
    seen = mask_of_chain(query, key, length)
    if base == "eager":  # its masks are added
        return torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
    return seen


Axes = dict[str, list[int]]
"""Path of a tensor in (args, kwargs, output) of a module -> its dimensions of positions."""


def run_by_document(module: nn.Module, axes: Axes) -> None:
    """Makes a module compute one chain after the other, each behind its ancestors, in place.

    This is exact for any causal module, but calls it once per chain. Tensors are cut along ``axes`` and
    joined again. Sizes do not identify the axes, because a row can be as long as the model is wide: the
    packing check finds them, with a row of 69 positions, which is no size of a model.
    Raises RuntimeError if documents are unknown, as in a recomputation without those of its forward.
    """
    whole, name = type(module).forward, type(module).__name__

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (rows := _rows.get(None)) is None:
            raise RuntimeError(f"{name} runs by document, and documents are unknown")
        if rows.documents is None or len(rows.documents.cu_seqlens) < 3:
            return whole(module, *args, **kwargs)
        (row,) = rows.documents
        row_chains = list(chains(row))

        def cut(path: Any, value: Any, chain: Chain) -> Any:
            if isinstance(value, Tensor):
                for axis in axes.get(keystr(path), ()):
                    parts = [value.narrow(axis, low, high - low) for low, high in chain.ranges]
                    value = torch.cat(parts, dim=axis) if chain.ancestors else parts[0]
            return value

        def join(path: Any, *values: Any) -> Any:
            if (output_axes := axes.get(f"[2]{keystr(path)}")) is None:
                return values[-1]  # a state after the last document
            axis, sizes = output_axes[0], [chain.stop - chain.start for chain in row_chains]
            # Without the ancestors, which a chain computes again.
            parts = [v.narrow(axis, v.size(axis) - size, size) for v, size in zip(values, sizes, strict=True)]
            return torch.cat(parts, dim=axis)

        def computed(chain: Chain) -> Any:
            chain_args, chain_kwargs = tree_map_with_path(partial(cut, chain=chain), (args, kwargs))
            return whole(module, *chain_args, **chain_kwargs)

        return tree_map_with_path(join, *map(computed, row_chains))

    # Compiled, it would be compiled again for each length. A method, so that a copy of the module calls its own.
    module.forward = MethodType(torch.compiler.disable(forward), module)
