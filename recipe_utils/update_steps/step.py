"""An update step as a value: all that one optimizer step computes, on one rank.

:mod:`recipe_utils.benchmark.baselines.bare_loop` is the idea in one file, with a worked example.
Shapes: b rows, s positions per row, n target tokens, p sequences of samples.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.utils._pytree import register_dataclass

T = TypeVar("T")


class Targets(NamedTuple):
    """Target tokens of a microbatch, and what stands beside them; of a dummy one every name, with n = p = 0."""

    labels: Tensor
    """[b, s]: the label of the *next* position, ``ignore_index`` where there is no target."""
    positions: Tensor
    """[n]: indices of the targets in the flattened [b * s] positions, ascending; from the CPU, so that n is known."""
    owners: Tensor | None = None
    """[b, s]: the sequence (0 to p - 1) of each position, -1 for padding; of a shared one, that whose target it has."""
    samples: Tensor | None = None
    """[p]: position in the update step of each sequence's sample, and ``items`` [p]: its index in the dataset. None,
    as ``owners``, if a ``collate_fn`` made another number of rows than samples."""
    items: Tensor | None = None
    ends: Tensor | None = None
    """[p]: index of each sequence's last token in the flattened positions; None in a share of a row."""
    values: Mapping[str, Tensor] = {}
    """[n] or [n, k] fp64 each: columns of the samples at the targets; ``defaults`` names those that nowhere differ from theirs."""
    defaults: frozenset[str] = frozenset()
    of_samples: Mapping[str, Tensor] = {}
    """[p, ...] each: values of the sequences' samples."""
    outputs: Mapping[str, Any] = {}
    """Outputs of a pass before the pass at these targets, by its name: tensors in any nesting."""

    @property
    def sequences(self) -> Tensor:
        """[n]: the sequence that owns each target."""
        return self.owners.flatten().index_select(0, self.positions)  # type: ignore[union-attr]

    def of_targets(self, of_sequences: Tensor) -> Tensor:
        """Returns [n, ...] of [p, ...]: at each target what belongs to its sequence."""
        return of_sequences.index_select(0, self.sequences)


@dataclass(frozen=True)
class Microbatch:
    """Tensors of one forward and backward, and their counts."""

    inputs: Mapping[str, Any]
    """Keyword arguments of the model's forward: ``tokens`` [b, s]; for packed rows also ``input_pos`` [b, s] and
    ``document_lengths`` (:class:`recipe_utils.text.documents.Documents`), which determine the attention mask."""
    targets: Targets
    counts: Mapping[str, float] = field(default_factory=dict)
    """Counts by name, which sum to the totals of the update step; empty for a dummy microbatch."""
    names: Sequence[str] = ()
    """Names of its samples, for errors."""

    def with_outputs(self, **outputs: Any) -> "Microbatch":
        """Returns the microbatch with further outputs of passes before its own, such as ``teacher``."""
        return replace(self, targets=self.targets._replace(outputs={**self.targets.outputs, **outputs}))


# PyTorch's tree functions copy it as part of larger structures.
register_dataclass(Microbatch)


@dataclass(frozen=True)
class UpdateStep:
    """Data of one optimizer step on this rank, with totals over all data-parallel (DP) ranks."""

    index: int
    """Position in its epoch, from 0."""
    microbatches: Sequence[Microbatch]
    """Microbatches of this rank, on the CPU; every rank has the same number."""
    totals: Mapping[str, float]
    """Counts of all microbatches by name, over all DP ranks: target_tokens, positions, skipped_samples, ..."""
    dp_degree: int
    """Number of ranks that hold different data."""
    samples_consumed: int = 0
    """Samples of the epoch over all ranks, up to and including this update step."""
    is_last_of_epoch: bool = False

    def scale(self, divisor: str) -> float:
        """Returns the factor for a microbatch's summed loss that makes it a mean over the total ``divisor``.

        FSDP2 and DDP average gradients over the DP ranks, hence ``dp_degree`` over the total.
        """
        return self.dp_degree / (self.totals[divisor] or 1)


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yields each item and True for the last one. Reads one item ahead."""
    for item, following in pairwise(chain(items, [None])):
        assert item is not None
        yield item, following is None
