"""Bytes of live storages, and FLOPs, of real or fake tensors."""

import weakref
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten, _flash = torch.ops.aten, "_scaled_dot_product_flash_attention"
_LIKE = {"addmm_": "addmm"} | {f"{_flash}_for_cpu{x}": f"{_flash}{x}" for x in ("", "_backward")}
"""Operation that PyTorch does not count -> operation with the same FLOPs."""
_FLOPS: dict[Any, Any] = flop_registry | {
    getattr(_aten, name): flop_registry[getattr(_aten, like)] for name, like in _LIKE.items()
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages: those that operations in it make, and those of :meth:`hold`.

    It follows ``storage.resize_``, with which FSDP2 frees and gathers weights.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._held: dict[int, tuple[Any, int]] = {}

    def hold(self, tensor: Tensor) -> None:
        """Counts a tensor's storages, or their new sizes. Those on the meta device take nothing."""
        if hasattr(tensor, "__tensor_flatten__"):  # DTensor and NF4
            for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
                if isinstance(part, Tensor):
                    self.hold(part)
        elif tensor.device.type != "meta":
            self._hold(tensor.untyped_storage())

    def _hold(self, storage: UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._held:
            self._held[key] = weakref.ref(storage, lambda _: self._release(key)), 0
        held, before = self._held[key]
        self._held[key] = held, size
        self.now += size - before
        self.peak = max(self.peak, self.now)

    def _release(self, key: int) -> None:
        self.now -= self._held.pop(key)[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # is called again with the parts
        made = func(*args, **(kwargs or {}))
        if (count := _FLOPS.get(getattr(func, "_overloadpacket", func))) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=made)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.hold(leaf)
        return made

    def __enter__(self) -> "LiveBytes":
        resize = UntypedStorage.resize_

        def follow(storage: UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._held:
                self._hold(storage)

        self._patch: Any = mock.patch.object(UntypedStorage, "resize_", follow)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        self._patch.stop()
