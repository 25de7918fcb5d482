"""Dropout whose masks do not depend on the layout: microbatches, rows, ranks, pipelines, recomputation.

A hash determines if an element is kept, without a random generator. It depends on the key of the
position, a hash of (seed, update step, sample, position in the sample), and on (module, channel).
Sequences of one sample (both answers of a pair, branches of a tree) have the same mask at the same
position, so a shared prefix has one.

Shapes: b rows, s positions, d channels.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import noop_context_fn

from recipe_utils.compiler import configure_compiler
from recipe_utils.model.attention.packed_attention import missing_for_triton


class _Forward:
    """Keys of the positions [b, s] int64 that a model computes now; None outside of training."""

    keys: Tensor | None = None


_forward = _Forward()


class _WithKeys(AbstractContextManager[None]):
    """Sets keys in a block, which may be entered again."""

    def __init__(
        self, keys: Tensor | None, inner: AbstractContextManager[Any] | None = None
    ) -> None:
        self._keys, self._inner = keys, inner or nullcontext()

    def __enter__(self) -> None:
        self._before, _forward.keys = _forward.keys, self._keys
        self._inner.__enter__()

    def __exit__(self, *reason: Any) -> None:
        _forward.keys = self._before
        self._inner.__exit__(*reason)


class LayoutFreeDropout(nn.Dropout):
    """Dropout of activations by the keys of their positions; a forward without keys draws as ``nn.Dropout``.

    ``name`` is the module's name in the whole model. Takes [b, s, ...] or [b * s, d]; raises ValueError
    for other shapes.
    """

    def __init__(self, p: float, name: str) -> None:
        super().__init__(p)
        self._name = name
        self._salt = zlib.crc32(name.encode()) - 2**31

    def forward(self, input: Tensor) -> Tensor:
        """Returns activations with a fraction ``p`` of them 0, the others divided by 1 - ``p``."""
        keys = _forward.keys
        if not self.training or self.p == 0 or keys is None:
            return super().forward(input)
        is_flat = input.dim() == 2 and input.size(0) == keys.numel()
        if not is_flat and (input.dim() < 3 or input.shape[:2] != keys.shape):
            raise ValueError(
                f"model: {self._name} drops from {list(input.shape)}, and rows have {list(keys.shape)} positions; "
                "set its dropout (lora_dropout of adapters) to 0"
            )
        drop = _drop
        if input.is_cuda and not torch.compiler.is_compiling():
            drop = _compiled()  # few kernels instead of about thirty
        return drop(input.reshape(*keys.shape, -1), keys, self._salt, self.p).view_as(input)


def _mixed(x: Tensor) -> Tensor:
    """Returns int32 hashes: MurmurHash3's fmix32 without its last step, which changes only low bits."""
    x = (x ^ (x >> 16 & 0xFFFF)) * -0x7A143595  # 0x85EBCA6B
    return (x ^ (x >> 13 & 0x7FFFF)) * -0x3D4D51CB  # 0xC2B2AE35


def _drop(x: Tensor, keys: Tensor, salt: int, p: float) -> Tensor:
    """Applies dropout to x [b, s, d]: drops the elements whose hashes are the lowest fraction ``p`` of all."""
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    rows = _mixed(_mixed(low ^ salt) ^ high)
    columns = _mixed(torch.arange(1, x.size(-1) + 1, dtype=torch.int32, device=x.device))
    hashes = _mixed(rows.unsqueeze(-1) ^ columns)
    kept = hashes >= round(p * 2**32) - 2**31
    return torch.where(kept, x, 0) * (1 / (1 - p))


@cache
def _compiled() -> Callable[..., Tensor]:
    configure_compiler()
    return _drop if missing_for_triton() else torch.compile(_drop, dynamic=True)


def replace_dropout(model: nn.Module, tensor_parallel_dim: int = 1) -> None:
    """Replaces ``nn.Dropout`` of activations in a whole decoder, in place; its forward takes the keys.

    Modules whose inputs are not [b, s, d] still use random generators: in attention scores, experts,
    models of images, and tensor parallelism (a part of the channels).
    """
    model.register_forward_pre_hook(_take_keys, with_kwargs=True)
    is_decoder = hasattr(model, "tok_embeddings") and not hasattr(model, "decoder")
    if tensor_parallel_dim > 1 or not is_decoder:
        return
    for name, module in list(model.named_modules()):
        is_other = "experts." in name or name.rpartition(".")[2] in _OF_SCORES
        if type(module) is nn.Dropout and 0 < module.p < 1 and not is_other:
            model.set_submodule(name, LayoutFreeDropout(module.p, name))


_OF_SCORES = {"attn_dropout", "attention_dropout"}


def _take_keys(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    _forward.keys = kwargs.pop("dropout_keys", None)
    return args, kwargs


def has_dropout(model: nn.Module) -> bool:
    """Returns True if a model's forward takes ``dropout_keys`` [b, s]."""
    return any(isinstance(module, LayoutFreeDropout) for module in model.modules())


def at_positions(ranges: Sequence[tuple[int, int]]) -> AbstractContextManager[None]:
    """Returns the context of a module that computes some ranges of a row's positions."""
    keys = _forward.keys
    if keys is not None:
        keys = torch.cat([keys[:, low:high] for low, high in ranges], dim=1)
    return _WithKeys(keys)


def recompute_with_keys(model: nn.Module) -> None:
    """Makes recomputed layers use the keys of their forward, although a pipeline has started other forwards."""

    def contexts(own: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:  # called in the forward
        of_forward, of_recomputation = own()
        return of_forward, _WithKeys(_forward.keys, of_recomputation)

    for wrapper in model.modules():
        if isinstance(wrapper, CheckpointWrapper):
            run: Any = wrapper.checkpoint_fn
            own = run.keywords.get("context_fn", noop_context_fn)
            wrapper.checkpoint_fn = partial(run, context_fn=partial(contexts, own))
