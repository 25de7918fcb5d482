"""Microbatches: the tensors of one forward and backward on one rank.

:mod:`recipe_utils.benchmark.baselines.bare_loop` is the idea in one file, with a worked example.
Shapes: b rows, s positions per row, n target tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
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
        self.datasets = torch.zeros(num_samples, dtype=torch.int64)
        """Index of the named dataset of each sample that this rank computes, [samples] on the CPU."""
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
            self.numbers += targets.sample_positions.bincount(minlength=len(self.numbers))

    def by_dataset(self, num_datasets: int, device: torch.device) -> Tensor:
        """Returns the sums of each named dataset, [datasets] in fp64."""
        sums = torch.zeros(num_datasets, dtype=torch.float64, device=device)
        if self.sums is None:  # no last stage of a pipeline
            return sums
        return sums.index_add_(0, self.datasets.to(device, non_blocking=True), self.sums)


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
    sample_positions: Tensor | None = None
    """[n], or [p] of pairs: position in the update step of each one's sample; None unless losses are
    summed by sample."""
    sample_sums: SampleSums | None = None
    """Sums of the update step, which the loss module adds to."""
    sample_weights: Tensor | None = None
    """[samples of the update step]: factor of the loss of a sample's targets, fp64; 1 on average over all
    targets. None for 1."""


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

    def with_sample_sums(self, sums: SampleSums, weights: Tensor | None) -> "Microbatch":
        """Returns the microbatch with sums and weights [samples] of its update step."""
        targets = self.targets._replace(sample_sums=sums, sample_weights=weights)
        return replace(self, targets=targets)


# PyTorch's tree functions copy it as part of larger structures.
register_dataclass(Microbatch)


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
