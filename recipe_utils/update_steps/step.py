"""An update step as a value: all that one optimizer step computes, on one rank.

Shapes: b rows, s positions per row, n target tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

T = TypeVar("T")


class Pairs(NamedTuple):
    """Targets of each answer, for samples that are pairs of answers; p pairs."""

    segment_lengths: Tensor
    """[3 * p]: for each pair the number of shared targets, of further ones of the chosen answer,
    and of the rejected one, in the order of the microbatch's targets."""
    names: tuple[str, ...]
    """Names of the pairs, for errors."""
    fingerprints: tuple[bytes, ...] = ()
    """Hashes of the pairs' tokens and labels, 16 bytes each, by which a reference is cached."""


class Targets(NamedTuple):
    """Target tokens of a microbatch."""

    labels: Tensor
    """[b, s]: the label of the *next* position, ``ignore_index`` where there is no target."""
    positions: Tensor
    """[n]: indices of the target tokens in the flattened [b * s] positions, ascending; computed on
    the CPU, so that n needs no device synchronization."""
    teacher: Any = None
    """Outputs of a frozen model (teacher or reference) at these targets: tensors in any nesting."""
    pairs: Pairs | None = None
    samples: Tensor | None = None
    """[n], or [p] of pairs: position in the update step of each one's sample, for losses by sample."""


@dataclass(frozen=True)
class Microbatch:
    """Tensors of one forward and backward, and their counts."""

    inputs: Mapping[str, Any]
    """Keyword arguments of the model's forward: ``tokens`` [b, s] and further outputs of the
    collate function; for packed rows also ``input_pos`` [b, s] and ``document_lengths``
    (:class:`recipe_utils.text.documents.Documents`), which determine the attention mask."""
    targets: Targets
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts by name, which sum to the totals of the update step; empty for a dummy microbatch."""

    def pin_memory(self) -> "Microbatch":
        """Returns a copy in page-locked memory, for device copies that do not block the host."""
        pinned: Microbatch = tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), self)
        return pinned

    def with_teacher(self, outputs: Any) -> "Microbatch":
        """Returns the microbatch with outputs of a frozen model at its targets."""
        return replace(self, targets=self.targets._replace(teacher=outputs))


# PyTorch's tree functions copy it as part of larger structures.
register_dataclass(Microbatch)


@dataclass(frozen=True)
class UpdateStep:
    """Data of one optimizer step on this rank, with totals over all data-parallel (DP) ranks."""

    index: int
    """Position in its epoch, from 0."""
    microbatches: Sequence[Microbatch]
    """Microbatches of this rank, on the CPU; every rank has the same number."""
    totals: Mapping[str, int]
    """Counts of all microbatches by name, over all DP ranks: target_tokens, positions, skipped_samples, ..."""
    dp_degree: int
    """Number of ranks that hold different data."""
    samples_consumed: int = 0
    """Samples of the epoch over all ranks, up to and including this update step."""
    is_last_of_epoch: bool = False

    def scale(self, count: str) -> float:
        """Returns the factor for a microbatch's summed loss that makes it a mean over ``count``.

        FSDP2 and DDP average gradients over the DP ranks, hence ``dp_degree`` over the total.
        """
        return self.dp_degree / max(self.totals[count], 1)


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yields each item and True for the last one. Reads one item ahead."""
    iterator = iter(items)
    last = next(iterator, None)
    for item in iterator:
        assert last is not None
        yield last, False
        last = item
    if last is not None:
        yield last, True
