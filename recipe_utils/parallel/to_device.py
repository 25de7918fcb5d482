"""Copies of microbatches to the device, one ahead of the computation."""

from collections.abc import Iterable, Iterator
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
