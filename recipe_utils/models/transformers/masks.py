"""Keeps the documents of packed rows apart in models of transformers: in their attention, or module by module.

Documents are passed beside the forward, never inferred from positions. Trees are computed chain by chain,
each behind its ancestors; a plain document is one chain.

Shapes: b rows, s positions, h heads, d width of a head.
"""

import sys
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import keystr, tree_map_with_path
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    or_masks,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from recipe_utils.models.attention.attend import PackedRows, Window, attend
from recipe_utils.models.attention.block_mask import block_mask, sees
from recipe_utils.models.transformers.interface import Axes
from recipe_utils.text.documents import Chain, chains

T = TypeVar("T")
ROWS: ContextVar[PackedRows | None] = ContextVar("rows")
"""Rows of the current forward, None if padded. No default: outside of a forward documents are unknown, not absent."""
NEEDS: ContextVar[set[str | tuple[int, int]] | None] = ContextVar("needs", default=None)
"""Collects needs of attention of packed rows: widths of keys and values, and names such as ``softcap``."""


class Setting(AbstractContextManager[None]):
    """Sets a context variable in a block; may be entered again, as where a split backward recomputes a layer twice."""

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable, self._value, self._tokens = variable, value, list[Any]()

    def __enter__(self) -> None:
        self._tokens.append(self._variable.set(self._value))

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._tokens.pop())


_infer_documents = masking_utils.find_packed_sequence_indices


def _packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
    """Returns None in a forward that sets :data:`ROWS`, which has documents.

    transformers treats every restart of positions as a document, and reads a number from the device.
    """
    return None if ROWS in copy_context() else _infer_documents(position_ids)


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


def _of_documents(make_overlay: Any) -> Any:
    """Returns a maker of windows or chunks, which are counted in the positions of documents; blocks of images are the row's."""

    def make(*args: Any) -> Any:
        overlay, rows = make_overlay(*args), ROWS.get(None)
        if rows is None or (positions := rows.positions) is None:
            return overlay
        return lambda b, h, q, k: overlay(b, h, positions[b, q], positions[b, k])

    return make


for _name in ("sliding_window_overlay", "chunked_overlay"):
    setattr(masking_utils, _name, _of_documents(getattr(masking_utils, _name)))


def _mask(
    make_mask: Any, *, mask_function: Any, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | BlockMask | Window | None:
    rows = ROWS.get(None)
    if rows is None:
        return make_mask(mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **kwargs)
    # Causal masks and windows are those that kernels have themselves, or a block mask from lengths alone.
    is_causal = mask_function is causal_mask_function
    window: int | None = getattr(mask_function, "window", None)
    if is_causal or window is not None:
        if rows.kernel == "flex" and (is_causal or rows.documents.ends is None):
            return block_mask(rows.documents, window)
        if rows.kernel not in ("flex", "dense"):
            return None if window is None else Window(window)
    # Any other mask, and windows of trees in flex attention, are computed for all pairs of positions.
    if rows.exchange is not None:
        raise ValueError("only causal masks and windows are those of a whole row on each of its ranks")
    # It says itself what is causal: tokens of an image may see each other both ways, in their document.
    is_seen = sees(rows.documents)
    both_ways = or_masks(is_seen, lambda b, h, q, k: is_seen(b, h, k, q))
    mask_function = and_masks(is_seen if is_causal else both_ways, mask_function)
    make_mask = _MASKS["flex_attention"] if rows.kernel == "flex" else make_mask
    kwargs["attention_mask"] = None
    return make_mask(mask_function=mask_function, allow_is_causal_skip=False, **kwargs)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _attend(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Computes attention of queries [b, h, s, d] as an attention of transformers; returns [b, s, h, d]."""
    rows, needs = ROWS.get(None), NEEDS.get()
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if base == "eager":
        own = sys.modules[type(module).__module__].eager_attention_forward
    if rows is None:
        return own(module, query, key, value, mask, **kwargs)
    if needs is not None:
        needs |= {(key.size(-1), value.size(-1))}
        needs |= {name for name in _NOT_IN_FLASH if kwargs.get(name) is not None}
        needs |= {"other masks"} if isinstance(mask, Tensor) else set()
    if rows.kernel == "varlen" and kwargs.get("dropout"):
        raise ValueError("FlashAttention does not support dropout; set packed_attention=by_document")
    own_of_module = partial(_own, own, base == "eager", module, kwargs)
    return attend(query, key, value, rows, mask, own_of_module, scale=kwargs.get("scaling")), None


_NOT_IN_FLASH = ("softcap", "s_aux", "position_bias")
"""Arguments of transformers' attention that FlashAttention of PyTorch does not have."""


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _own(
    own: Any, adds_masks: bool, module: nn.Module, kwargs: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, mask: Any
) -> Tensor:
    """Computes attention by transformers' flex attention, if that is the mask's, or by a module's own function."""
    if isinstance(mask, BlockMask):
        own = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    elif kwargs.get("position_bias") is not None:
        raise ValueError("a bias of positions is not split")
    elif adds_masks and (mask is None or mask.dtype == torch.bool):
        if mask is None:
            mask = torch.ones(1, 1, q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    attended: Tensor = own(module, q, k, v, mask, **kwargs)[0]
    return attended


def run_by_document(module: nn.Module, axes: Axes) -> None:
    """Makes a module compute one chain after the other, each behind its ancestors, in place.

    This is exact for any causal module, but calls it once per chain. Tensors are cut along ``axes`` and
    joined again. Sizes do not identify the axes, because a row can be as long as the model is wide: the
    packing check finds them, with a row of 69 positions, which is no size of a model.
    Raises RuntimeError if documents are unknown, as in a recomputation without those of its forward.
    """
    whole, name = type(module).forward, type(module).__name__

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if ROWS not in copy_context():
            raise RuntimeError(f"{name} runs by document, and documents are unknown")
        rows = ROWS.get()
        if rows is None or len(rows.documents.cu_seqlens) < 3:
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


def run_without_documents(tower: nn.Module) -> None:
    """Makes a tower compute its images without the documents of the row, whose masks are of another length, in place."""
    whole = type(tower).forward

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with Setting(ROWS, None):
            return whole(module, *args, **kwargs)

    tower.forward = MethodType(forward, tower)
