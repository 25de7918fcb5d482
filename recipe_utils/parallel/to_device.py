"""Copies to the device, one microbatch ahead of the computation, and to the host, one update step behind it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")


def to_device_ahead(trees: Iterable[T], device: torch.device) -> Iterator[T]:
    """Yields trees of tensors on ``device``, and copies the next one during the computation.

    On CUDA copies use a separate stream, so that neither the host nor the computation waits for
    copies from pinned memory. At most two trees are held. Other leaves are unchanged.
    """
    stream = _copy_stream(device) if device.type == "cuda" else None
    ahead: list[tuple[T, torch.cuda.Event | None]] = []
    for tree in trees:
        with record_function("to device"), torch.cuda.stream(stream) if stream is not None else nullcontext():
            copy = tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), tree)
            ahead.append((copy, stream.record_event() if stream is not None else None))
        del tree, copy
        if len(ahead) == 2:
            yield _wait_for(*ahead.pop(0))
    if ahead:
        yield _wait_for(*ahead.pop())


def pinned(tree: T) -> T:
    """Returns a copy of a tree of tensors in page-locked memory, for device copies that do not block the host."""
    copy: T = tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), tree)
    return copy


class ToHostLater:
    """Copy of a tensor to the host that is read when the next update step is enqueued, so that the host does not wait.

    Unless ``is_late``, as on a CPU, it is read at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_late = device.type != "cpu"
        self._held: Callable[[], None] | None = None

    def hold(self, tensor: Tensor, take: Callable[[Tensor], None]) -> None:
        """Copies a tensor, and passes it to ``take`` at the next :meth:`read`."""
        on_host = tensor.to("cpu", non_blocking=tensor.is_cuda)  # pinned by PyTorch
        arrived = torch.cuda.current_stream().record_event() if tensor.is_cuda else None

        def read() -> None:
            if arrived is not None:
                arrived.synchronize()
            take(on_host)

        self._held = read
        if not self.is_late:
            self.read()

    def read(self) -> None:
        """Passes on what is held, once it has arrived."""
        held, self._held = self._held, None
        if held is not None:
            held()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns one stream per process: CUDA reuses 32, so one per update step would collide with NCCL's."""
    return torch.cuda.Stream(device)


def _wait_for(tree: T, done: torch.cuda.Event | None) -> T:
    """Makes the current stream, not the host, wait for a copy."""
    if done is not None:
        current = torch.cuda.current_stream()
        current.wait_event(done)
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                leaf.record_stream(current)  # else the copy stream reuses its memory too early
    return tree
