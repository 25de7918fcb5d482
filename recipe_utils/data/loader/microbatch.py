"""Microbatches: the tensors of one forward and backward on one rank.

Shapes: b rows, s positions per row, n target tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

T = TypeVar("T")


class Pairs(NamedTuple):
    """Targets of each answer, for samples that are pairs of answers; p pairs."""

    segment_lengths: Tensor
    """[3 * p]: number of targets that both answers of a pair share, further ones of the chosen answer, and of the rejected
    one; in the order of the microbatch's targets."""
    names: tuple[str, ...]
    """Names of the pairs, for errors."""


class CacheKeys(NamedTuple):
    """Attached to a microbatch until the training loop looks up, or computes, a frozen model's outputs."""

    keys: tuple[bytes, ...]
    """Cache keys of the samples."""
    num_rows: tuple[int, ...]
    """Outputs of each sample; they follow one another in the microbatch's."""
    num_missing: int
    """Samples that the cache did not contain when the microbatch was prepared."""


class Targets(NamedTuple):
    """Target tokens of a microbatch."""

    labels: Tensor
    """[b, s]: the label of the *next* position, ``ignore_index`` where there is no target."""
    positions: Tensor
    """[n]: indices of the target tokens in the flattened [b * s] positions, ascending. Computed on the CPU, so that n is
    known without a device synchronization."""
    teacher: Any = None
    """Outputs of a frozen model (teacher or reference) at these targets: tensors in any nesting."""
    pairs: Pairs | None = None


@dataclass(frozen=True)
class Microbatch:
    """Tensors of one forward and backward, and their counts."""

    inputs: Mapping[str, Any]
    """Keyword arguments of the model's forward: ``tokens`` [b, s] and everything but labels that the collate function
    returned; for packed rows also ``input_pos`` [b, s] and ``document_lengths``
    (:class:`recipe_utils.data.text.documents.Documents`), from which the model makes its attention mask."""
    targets: Targets
    counts: Mapping[str, int] = field(default_factory=dict)
    """Its part of the update step's totals, by name; empty for a dummy microbatch."""

    def pin_memory(self) -> "Microbatch":
        """Returns a copy in page-locked memory, from which a device copy does not block the host."""
        pinned: Microbatch = tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), self)
        return pinned

    def with_teacher(self, outputs: Any) -> "Microbatch":
        """Returns the microbatch with outputs of a frozen model at its targets."""
        return replace(self, targets=self.targets._replace(teacher=outputs))


# PyTorch's tree functions copy it as part of larger structures.
register_dataclass(Microbatch)


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yields each item and True for the last one. Takes one item ahead."""
    iterator = iter(items)
    try:
        held = next(iterator)
    except StopIteration:
        return
    for item in iterator:
        yield held, False
        held = item
    yield held, True
