"""Keeps the documents of packed rows apart in models of transformers: in their attention, or module by module.

Documents are passed beside the forward, never inferred from positions. In prefix-shared pairs neither
answer attends to the other, and both continue the positions of the prefix.

Shapes: b rows, s positions, h heads, d width of a head.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
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
    sliding_window_overlay,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from recipe_utils.data.text.documents import Documents, segment_lengths
from recipe_utils.data.text.limits import Kernel
from recipe_utils.model.attention.block_mask import block_mask, sees
from recipe_utils.model.attention.document_mask import attend_by_varlen


class Exchange(NamedTuple):
    """Functions of :mod:`recipe_utils.model.attention.rows_over_ranks` between the ranks of a row."""

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
    """Collects what attention needs: widths of keys and values, and names such as ``softcap``."""


_rows: ContextVar[Rows] = ContextVar("rows")
"""Without a default: outside of a forward documents are unknown, not absent."""


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

    transformers takes every restart of positions for a document, and reads a number from the device.
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


def _window_of(mask_function: Any) -> int | None:
    """Returns the length of a causal mask function's sliding window; None for any other function."""
    functions = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    if len(functions) != 1 or not isinstance(functions[0], tuple) or len(functions[0]) != 2:
        return None
    overlay, causal = functions[0]
    if causal is not causal_mask_function or overlay.__code__ is not _OVERLAY.__code__:
        return None
    if mask_function.__code__ is not and_masks(_OVERLAY, causal).__code__:
        return None
    length: int = overlay.__closure__[0].cell_contents
    return length


_OVERLAY = sliding_window_overlay(1)


def _mask(
    make_mask: Any, *, mask_function: Any, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | BlockMask | Window | None:
    documents, positions, exchange, kernel, _ = _rows.get(Rows())
    if documents is None:
        return make_mask(
            mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **kwargs
        )
    is_causal, window = mask_function is causal_mask_function, _window_of(mask_function)
    if (is_causal or window is not None) and documents.segments is None:
        if kernel == "flex":
            return block_mask(documents, window)
        if kernel != "dense":
            return None if window is None else Window(window)
    if exchange is not None:
        raise ValueError(
            "only causal masks and windows are those of a whole row on each of its ranks"
        )
    if is_causal and kernel == "flex":
        return block_mask(documents)
    if not is_causal:
        mask_function = remap_positions_for_packed_sequence(mask_function, positions)
    mask_function = and_masks(sees(documents), mask_function)
    make_mask = _MASKS["flex_attention"] if kernel == "flex" else make_mask
    kwargs["attention_mask"] = None
    return make_mask(mask_function=mask_function, allow_is_causal_skip=False, **kwargs)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _attend(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **kwargs: Any,
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
    if exchange is not None:
        q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
        q, k, v = (e.transpose(0, 1).unsqueeze(0) for e in exchange.heads_of_row(q, k, v))
        with forward_of(rows._replace(exchange=None)):
            attended, _ = _attend(base, module, q, k, v, mask, **kwargs)
        return exchange.tokens_of_part(attended.squeeze(0)).unsqueeze(0), None
    if isinstance(mask, BlockMask):
        flex = ALL_ATTENTION_FUNCTIONS["flex_attention"]
        return flex(module, query, key, value, mask, **kwargs)
    if kernel == "dense" or documents.segments is not None:
        return attend(module, query, key, value, mask, **kwargs)
    if kernel == "varlen":
        if kwargs.get("dropout"):
            raise ValueError(
                "FlashAttention does not support dropout; set packed_attention=by_document"
            )
        flat = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        window = None if mask is None else mask.length
        attended = attend_by_varlen(*flat, documents, window, kwargs.get("scaling"))
        return attended.unflatten(0, (len(query), -1)), None
    return _attend_by_document(
        attend, base, module, query, key, value, mask, documents, kwargs
    ), None


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
    for index, (row, *tensors) in enumerate(
        zip(documents, query.split(1), key.split(1), value.split(1), strict=True)
    ):
        lengths, outputs, start = segment_lengths(row), [], 0
        # split and cat, because the backward of a slice fills a gradient of the whole row.
        for part in zip(*(each.split(lengths, dim=2) for each in tensors), strict=True):
            length = part[0].size(2)
            if isinstance(mask, Tensor):
                own = slice(start, start + length)
                of_document: Tensor | None = mask[index % len(mask), None, :, own, own]
            else:
                of_document = _mask_of_document(part[0], mask, base)
            outputs.append(attend(module, *part, of_document, **kwargs)[0])
            start += length
        rows.append(torch.cat(outputs, dim=1))
    return torch.cat(rows)


def _mask_of_document(query: Tensor, window: Window | None, base: str) -> Tensor | None:
    """Returns the mask [1, 1, s, s] of one document; None for SDPA's own causal mask."""
    length = query.size(2)
    if base == "sdpa" and (window is None or length <= window.length):
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if window is not None:
        seen = seen.triu(1 - window.length)
    if base == "eager":  # its masks are added
        seen = torch.zeros_like(seen, dtype=query.dtype).masked_fill(
            ~seen, torch.finfo(query.dtype).min
        )
    return seen[None, None]


Axes = dict[str, list[int]]
"""Path of a tensor among the arguments or outputs of a module -> its dimensions of positions."""


def run_by_document(module: nn.Module, axes: Axes, learns: bool) -> None:
    """Makes a module compute one document after the other, in place.

    Exact for whatever mixes positions, at the price of one call for each document. Tensors are cut
    along ``axes`` and joined again. A row can be as long as the model is wide, so the axes cannot be
    told by their sizes: the proof, whose row and documents have lengths of their own, learns them.
    Raises RuntimeError where documents are unknown, as in a recomputation without those of its forward.
    """
    whole, name = module.forward, type(module).__name__

    def forward(*args: Any, **kwargs: Any) -> Any:
        if (rows := _rows.get(None)) is None:
            raise RuntimeError(f"{name} runs by document, and documents are unknown")
        if rows.documents is None or len(rows.documents.boundaries) < 3:
            return whole(*args, **kwargs)
        (row,) = rows.documents
        lengths = segment_lengths(row)

        def learn(place: str, path: Any, *tensors: Any, sizes: Sequence[int]) -> None:
            if not learns or not isinstance(tensors[0], Tensor):
                return
            shapes = zip(*(tensor.shape for tensor in tensors), strict=True)
            found = [axis for axis, of_axis in enumerate(shapes) if list(of_axis) == [*sizes]]
            if found and axes.setdefault(name + place + keystr(path), found) != found:
                raise ValueError(f"positions are axes {found} and others of {place}{keystr(path)}")

        def cut(path: Any, value: Any, start: int, length: int) -> Any:
            if isinstance(value, Tensor):
                for axis in axes.get(f"{name} input {keystr(path)}", ()):
                    value = value.narrow(axis, start, length)
            return value

        def join(path: Any, *values: Any) -> Any:
            learn(" output ", path, *values, sizes=lengths)
            axis = axes.get(f"{name} output {keystr(path)}")
            # Without positions it is a state after the last document.
            return values[-1] if axis is None else torch.cat(values, dim=axis[0])

        tree_map_with_path(partial(learn, " input ", sizes=[sum(lengths)]), (args, kwargs))
        parts, start = [], 0
        for length in lengths:
            own = tree_map_with_path(partial(cut, start=start, length=length), (args, kwargs))
            parts.append(whole(*own[0], **own[1]))
            start += length
        return tree_map_with_path(join, *parts)

    # Compiled, it would be compiled again for each length.
    module.forward = torch.compiler.disable(forward)
