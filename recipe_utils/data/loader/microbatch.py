"""Microbatches: the tensors of one forward and backward on one rank.

Shapes: b rows, s positions per row, n target tokens, k named datasets.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

T = TypeVar("T")

OF_DATASET = "target_tokens/"
"""Prefix of the counts of named datasets."""


class SampleSums:
    """Losses of an update step by sample on this rank, to which loss modules add without gradients."""

    def __init__(self, num_samples: int) -> None:
        self.numbers = torch.zeros(num_samples, dtype=torch.float64)
        """Targets, or pairs, of each sample, [samples] on the CPU."""
        self.sums: Tensor | None = None
        """Sums over them on the device of the loss, [samples] in fp64; None before a loss."""

    def add(self, losses: Tensor, positions: Tensor) -> None:
        """Adds losses of targets or pairs, [n], of the samples at ``positions`` [n]."""
        if self.sums is None:
            size = len(self.numbers)
            self.sums = torch.zeros(size, dtype=torch.float64, device=losses.device)
        self.sums.index_add_(0, positions, losses.detach().double())

    def count(self, targets: "Targets") -> None:
        """Adds the numbers of a microbatch on the CPU."""
        if targets.sample_positions is not None:
            num_ranks = 1 if targets.pairs is None else targets.pairs.num_ranks
            found = targets.sample_positions.bincount(minlength=len(self.numbers))
            self.numbers += found / num_ranks


class Pairs(NamedTuple):
    """Targets of each answer, for samples that are pairs of answers; p pairs."""

    segment_lengths: Tensor
    """[3 * p]: for each pair the number of shared targets, of further ones of the chosen answer,
    and of the rejected one, in the order of the microbatch's targets."""
    names: tuple[str, ...]
    """Names of the pairs, for errors."""
    fingerprints: tuple[bytes, ...]
    """Hashes of the pairs' tokens and labels, 16 bytes each, by which a reference is cached."""
    of_row: Tensor | None = None
    """[3 * p]: the same numbers of a whole row; None if no other rank computes a part of it."""
    num_ranks: int = 1
    """Ranks that compute the row together."""


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
    dataset_indices: Tensor | None = None
    """[n]: index of each target's dataset; None without named datasets."""
    dataset_weights: Tensor | None = None
    """[k]: factor of the loss of a target by dataset, fp64; 1 on average over the update step's
    targets. None without sums by dataset."""
    sample_positions: Tensor | None = None
    """[n], or [p] of pairs: position in the update step of each one's sample; None unless
    ``sample_losses``."""
    sample_sums: SampleSums | None = None
    """Sums of the update step, which the loss module adds to."""

    def num_of_dataset(self, index: int) -> int:
        """Returns the number of targets of a named dataset."""
        return 0 if self.dataset_indices is None else int((self.dataset_indices == index).sum())


@dataclass(frozen=True)
class Microbatch:
    """Tensors of one forward and backward, and their counts."""

    inputs: Mapping[str, Any]
    """Keyword arguments of the model's forward: ``tokens`` [b, s] and further outputs of the
    collate function; for packed rows also ``input_pos`` [b, s] and ``document_lengths``
    (:class:`recipe_utils.data.text.documents.Documents`), which determine the attention mask; for a model
    with dropout ``dropout_keys`` [b, s] int64, without which it draws from a generator."""
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

    def with_dataset_weights(self, weights: Tensor) -> "Microbatch":
        """Returns the microbatch with weights [k] of its targets' datasets."""
        return replace(self, targets=self.targets._replace(dataset_weights=weights))

    def with_sample_sums(self, sums: SampleSums) -> "Microbatch":
        """Returns the microbatch with the sums of its update step."""
        return replace(self, targets=self.targets._replace(sample_sums=sums))


# PyTorch's tree functions copy it as part of larger structures.
register_dataclass(Microbatch)


def counts_of(
    microbatches: Sequence[Microbatch], names: Sequence[str], of_datasets: Sequence[str]
) -> dict[str, int]:
    """Returns the sums of counts by name, and target tokens by the names of named datasets."""
    counts = {name: sum(m.counts.get(name, 0) for m in microbatches) for name in names}
    for index, name in enumerate(of_datasets):
        counts[name] = sum(m.targets.num_of_dataset(index) for m in microbatches)
    return counts


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yields each item and True for the last one. Reads one item ahead."""
    iterator = iter(items)
    try:
        held = next(iterator)
    except StopIteration:
        return
    for item in iterator:
        yield held, False
        held = item
    yield held, True
