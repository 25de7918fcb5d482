"""Interface between the loader and the samples of one objective.

A collator of text, with rows of at most 10 tokens, for samples of 5, 3, 9 and 2 tokens: ``prepare`` checks each one in
a worker, ``length`` returns 5, 3, 9, 2, ``plan`` of one rank [[2], [0, 1, 3]], ``collate`` of samples 0, 1 and 3 a row
of 10 tokens with ``counts`` of 7 target tokens, and ``dummy`` a row of one token and padding, without a target.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol, Self

from recipe_utils.plans.rounds import Plan
from recipe_utils.update_steps.samples import Sample
from recipe_utils.update_steps.step import Microbatch


class Collator(Protocol):
    """Checks, measurement, plans and collation of the samples of one objective."""

    counts: Sequence[str]
    """Names of its counts; a sample whose first count is 0 has nothing to train on."""
    fingerprint_keys: Sequence[str]
    """Keys of a sample that are hashed to recognize the dataset on resume."""
    block: int = 1
    """Number of consecutive samples of an update step, a divisor of ``batch_size``, that stay on one
    rank. Losses that couple samples need it."""
    row_multiple: int | None = None
    """Divisor of the positions of packed rows, or of their parts on several ranks; None for any number."""
    moves_samples: bool = False
    """True if samples move between DP ranks."""
    plan: Plan
    """Assigns samples to microbatches and ranks; see :mod:`recipe_utils.plans.rounds`."""

    @abstractmethod
    def prepare(self, sample: Sample, name: str, /) -> Sample:
        """Converts an item of the dataset for the other methods. Called in DataLoader workers.

        Raises:
            SampleError: the sample cannot be trained on; the message starts with ``name``.
        """

    @abstractmethod
    def length(self, sample: Sample) -> int:
        """Returns the value that ``plan`` takes for a sample: its length, or for views its position."""

    def split(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        """Returns the samples of each microbatch into which one of the plan is split."""
        return [samples]

    @abstractmethod
    def collate(self, samples: Sequence[Sample]) -> Microbatch:
        """Makes a microbatch."""

    @abstractmethod
    def dummy(self, sample: Sample) -> Microbatch:
        """Makes a dummy microbatch, whose loss is zero and has a graph.

        Ranks with fewer microbatches run it, so that FSDP's collectives match.
        """

    def with_budget(self, max_tokens: int) -> Self:
        """Returns a collator of microbatches of at most ``max_tokens``, if their tokens are bounded."""
        return self

    def warnings(self) -> Iterator[str]:
        """Yields warnings to log before training."""
        yield from ()

    def remarks(self, sample: Sample) -> Iterator[str]:
        """Yields doubts about a prepared sample, as texts that are counted over samples."""
        yield from ()
