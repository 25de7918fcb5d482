"""Bytes of live storages and FLOPs of a step, of real or fake tensors."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten: Any = torch.ops.aten
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,  # without attention on a CPU
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


class LiveBytes(TorchDispatchMode):
    """Counts bytes of the storages that operations in it make, and those of :meth:`hold`, while they live.

    It also follows ``storage.resize_``, with which FSDP2 frees and gathers weights.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._held: dict[int, tuple[Any, int]] = {}

    def hold(self, tensor: Tensor) -> None:
        """Counts a tensor's storage; again, if its size has changed."""
        if not hasattr(tensor, "__tensor_flatten__"):
            self._hold(tensor.untyped_storage())
            return
        for name in tensor.__tensor_flatten__()[0]:  # of DTensor and NF4
            if isinstance(inner := getattr(tensor, name), Tensor):
                self.hold(inner)

    def _hold(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._held:
            self._held[key] = weakref.ref(storage, lambda _: self._release(key)), 0
        held, size = self._held[key]
        self._held[key] = held, storage.nbytes()
        self.now += storage.nbytes() - size
        self.peak = max(self.peak, self.now)

    def _release(self, key: int) -> None:
        self.now -= self._held.pop(key)[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # DTensor and NF4 come back with what they are made of
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if (count := _FLOPS.get(getattr(func, "_overloadpacket", func))) is not None:
            self.flops += count(*args, **kwargs, out_val=made)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.hold(leaf)
        return made

    def __enter__(self) -> "LiveBytes":
        resize = self._resize = UntypedStorage.resize_

        def follow(storage: UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            if storage._cdata in self._held:
                self._hold(storage)
            return resized

        UntypedStorage.resize_ = follow  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
