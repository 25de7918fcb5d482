"""Copies microbatches to the device, one ahead of the computation."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")


def to_device_ahead(trees: Iterable[T], device: torch.device) -> Iterator[T]:
    """Yields trees of tensors on ``device``; the next one is copied while one is computed with.

    On CUDA the copies use a stream of their own and pinned memory, so that neither the host nor the computation waits
    for them. At most two of the trees are held.

    Args:
        trees: trees on the CPU, each taken when its copy starts. Leaves that are not tensors stay as they are.
        device: device whose current stream uses the tensors.
    """
    copy_stream = _copy_stream(device) if device.type == "cuda" else None
    ahead: list[_Copy[T]] = []
    for tree in trees:
        ahead.append(_start_copy(tree, device, copy_stream))
        del tree
        if len(ahead) == 2:
            yield _wait_for(ahead.pop(0))
    if ahead:
        yield _wait_for(ahead.pop())


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for the process: CUDA reuses 32 of them, and a new one per update step would collide with NCCL's."""
    return torch.cuda.Stream(device)


class _Copy(NamedTuple, Generic[T]):
    tree: T
    done: torch.cuda.Event | None


def _start_copy(tree: T, device: torch.device, stream: torch.cuda.Stream | None) -> _Copy[T]:
    if stream is None:
        return _Copy(_to(tree, device), None)
    with torch.cuda.stream(stream):
        return _Copy(_to(tree, device), stream.record_event())


def _to(tree: T, device: torch.device) -> T:
    copied: T = tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), tree)
    return copied


def _wait_for(copy: _Copy[T]) -> T:
    """Makes the current stream, not the host, wait for a copy."""
    if copy.done is not None:
        current = torch.cuda.current_stream()
        current.wait_event(copy.done)
        for leaf in tree_leaves(copy.tree):
            if isinstance(leaf, Tensor):
                leaf.record_stream(current)  # else the copy stream reuses its memory too early
    return copy.tree
