"""Brings microbatches to the device, one ahead of the one that computes."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from recipe_utils.data.collate import Microbatch


def copy_ahead(
    step: Iterable[tuple[Microbatch, bool]], device: torch.device
) -> Iterator[tuple[Microbatch, bool]]:
    """The microbatches of an update step on ``device``; the next is copied while one computes.

    On CUDA the copies go through a stream of their own, from pinned memory, so neither the host nor the
    computation waits for them. No more than two microbatches are held.

    Args:
        step: an update step, on the CPU.
        device: where to compute; its current stream is the one that uses the microbatches.

    Yields:
        As ``step``: microbatch, and whether it is the last.
    """
    copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    ahead: list[_Copy] = []
    for microbatch, is_last in step:
        ahead.append(_start_copy(microbatch, is_last, device, copy_stream))
        del microbatch
        if len(ahead) == 2:
            yield _wait_for(ahead.pop(0))
    if ahead:
        yield _wait_for(ahead.pop())


class _Copy(NamedTuple):
    microbatch: Microbatch
    is_last: bool
    done: torch.cuda.Event | None


def _start_copy(
    microbatch: Microbatch, is_last: bool, device: torch.device, stream: torch.cuda.Stream | None
) -> _Copy:
    if stream is None:
        return _Copy(microbatch.to(device), is_last, None)
    with torch.cuda.stream(stream):
        return _Copy(microbatch.to(device), is_last, stream.record_event())


def _wait_for(copy: _Copy) -> tuple[Microbatch, bool]:
    """Makes the current stream wait; the host does not."""
    if copy.done is not None:
        current = torch.cuda.current_stream()
        current.wait_event(copy.done)
        for leaf in tree_leaves((dict(copy.microbatch.inputs), copy.microbatch.targets)):
            if isinstance(leaf, Tensor):
                leaf.record_stream(current)  # or the copy stream would reuse its memory too early
    return copy.microbatch, copy.is_last
