"""Bytes of live storages, and FLOPs, of real or fake tensors."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_FLOPS: dict[str, Any] = {each.__name__: count for each, count in flop_registry.items()}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages: those that operations in it make, and those of :meth:`hold`.

    FSDP2 gathers and frees weights by resizing storages, which is no operation: its own operations read all
    sizes, all others those of storages that were resized before.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._held: dict[int, tuple[Any, int]] = {}
        self._resized: set[int] = set()

    def hold(self, tensor: Tensor) -> None:
        """Counts a tensor's storages. Those on the meta device take nothing."""
        if hasattr(tensor, "__tensor_flatten__"):  # DTensor and NF4
            for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
                if isinstance(part, Tensor):
                    self.hold(part)
        elif tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self._held:
                self._held[key] = weakref.ref(storage, lambda _: self._release(key)), 0
                self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        held, before = self._held[key]
        self._held[key] = held, size
        self.now += size - before
        self.peak = max(self.peak, self.now)

    def _release(self, key: int) -> None:
        self.now -= self._held.pop(key)[1]
        self._resized.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # is called again with the parts
        for key in [*(self._held if getattr(func, "namespace", "") == "fsdp" else self._resized)]:
            if key not in self._held:  # released since the loop began, by the garbage collector
                continue
            held, before = self._held[key]
            if (storage := held()) is not None and storage.nbytes() != before:
                self._resized.add(key)
                self._resize(key, storage.nbytes())
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").partition(".")[0].replace("_for_cpu", "")
        if (count := _FLOPS.get(name.removesuffix("_"))) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=made)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.hold(leaf)
        return made
