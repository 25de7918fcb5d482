"""What one forward and backward consumes on one rank.

Shapes: b rows, s slots (positions) per row, n target tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

T = TypeVar("T")


class Pairs(NamedTuple):
    """Which targets belong to which answer, where samples are pairs of answers; p pairs."""

    segment_lengths: Tensor
    """[3 * p]: targets that both answers of a pair share, the chosen one's others, the rejected one's
    others. In this order they are the targets of the microbatch."""
    names: tuple[str, ...]
    """Of the pairs, for errors."""
    keys: tuple[bytes, ...]
    """What tells each pair from all others."""
    unknown: Any = None
    """A microbatch of those pairs of which a reference must say something yet; None if it is all or none."""


class Targets(NamedTuple):
    """What a microbatch is asked to predict."""

    labels: Tensor
    """[b, s]: the label of the *next* position, ``ignore_index`` where there is no target."""
    positions: Tensor
    """[n]: indices of the target tokens in the flattened [b * s] slots, ascending. Found on the CPU,
    so that no device has to be waited for to learn n."""
    teacher: Any = None
    """What another model, a teacher or a reference, says of these targets: tensors in any nesting."""
    pairs: Pairs | None = None


@dataclass(frozen=True)
class Microbatch:
    """The tensors of one forward and backward, and what they hold."""

    inputs: Mapping[str, Any]
    """Keyword arguments of the model's forward: ``tokens`` [b, s], whatever else the collate function
    returned besides labels and, for packed rows, ``input_pos`` [b, s] and ``document_lengths``
    (:class:`recipe_utils.data.text.documents.Documents`), of which :mod:`recipe_utils.model.attention.document_mask` makes
    the mask: no mask waits in the queue."""
    targets: Targets
    counts: Mapping[str, int] = field(default_factory=dict)
    """What it adds to the update step's totals, by name; nothing for a stand-in."""

    def pin_memory(self) -> "Microbatch":
        """Copies to page-locked memory, from which a device copy does not block the host."""
        pinned: Microbatch = tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), self)
        return pinned

    def with_teacher(self, outputs: Any) -> "Microbatch":
        """The same with what another model says of its targets."""
        return replace(self, targets=self.targets._replace(teacher=outputs))


# As a tree of its tensors it can be copied along with whatever stands beside it.
register_dataclass(Microbatch)


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last; looks one item ahead."""
    iterator = iter(items)
    try:
        held = next(iterator)
    except StopIteration:
        return
    for item in iterator:
        yield held, False
        held = item
    yield held, True
