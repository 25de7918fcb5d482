"""Interface between the loader and the samples of one objective.

A collator of text, with rows of at most 10 tokens, for samples of 5, 3, 9 and 2 tokens: ``prepare`` checks each one in
a worker, ``length`` returns 5, 3, 9, 2, ``plan`` of one rank [[2], [0, 1, 3]], ``collate`` of samples 0, 1 and 3 a row
of 10 tokens with ``counts`` of 7 target tokens, and ``dummy`` a row of one token and padding, without a target.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from recipe_utils.plans.rounds import WHOLE, Plan, Share
from recipe_utils.update_steps.order import StepIndex
from recipe_utils.update_steps.samples import Prepared, Sample
from recipe_utils.update_steps.step import Microbatch


@dataclass(frozen=True)
class Declaration:
    """What a loss takes of samples, and what it is divided by; attributes of the same names declare it."""

    columns: Mapping[str, float | None] = field(default_factory=dict)
    """Name and default of what stands beside each label of a sample; None: a sample without it is an error."""
    of_samples: Sequence[str] = ()
    """Names of values of samples, of any shape that is the same for all."""
    divisor: str = "target_tokens"
    """Count that the loss is divided by: of the collator, or a column or value, whose sum over the update step it is."""
    sums: Sequence[str] = ("loss",)
    """Names of the sums over targets that it returns; the first is differentiated."""
    totals: Sequence[str] = ()
    """Further columns and values whose sums are totals of update steps."""
    couples_sequences: bool = False
    """A term depends on several sequences of a sample, which are therefore in one microbatch."""


NOTHING_DECLARED = Declaration()


def declared_by(loss_fn: Any) -> Declaration:
    """Returns what a loss module, or its class, declares by its attributes.

    Raises ValueError for attributes of other types, and names that a sample has already.
    """
    given = {name: getattr(loss_fn, name) for name in vars(NOTHING_DECLARED) if hasattr(loss_fn, name)}
    loss = f"loss: {getattr(loss_fn, '__name__', type(loss_fn).__name__)}"
    kinds: dict[str, tuple[type | tuple[type, ...], str]] = {
        "columns": (Mapping, "a mapping"),
        "divisor": (str, "a name"),
        "couples_sequences": (bool, "True or False"),
    }
    for name, value in given.items():
        kind, text = kinds.get(name, ((tuple, list), "a tuple of names"))
        if not isinstance(value, kind):
            raise ValueError(f"{loss}.{name} is {value!r}; set it to {text}")
    declared = Declaration(**given)
    if taken := {"tokens", "labels", "sequences", "input_pos", "seq_lens"} & {*declared.columns, *declared.of_samples}:
        raise ValueError(f"{loss} takes {min(taken)} beside tokens and labels; rename it")
    return Declaration(**{**given, "totals": (*declared.totals, declared.divisor)})


@dataclass(frozen=True)
class Layout:
    """How samples become microbatches on ranks."""

    plan: Plan
    """Assigns samples to microbatches and ranks; see :mod:`recipe_utils.plans.rounds`."""
    moves_samples: bool = False
    """True if samples move between DP ranks."""
    block: int = 1
    """Number of consecutive samples of an update step, a divisor of ``batch_size``, that stay on one
    rank. Losses that couple samples need it."""
    row_multiple: int | None = None
    """Packed rows, or their shares on several ranks, have a multiple of so many positions; None for any number."""


class Collator(Protocol):
    """Checks, measurement, plans and collation of the samples of one objective."""

    counts: Sequence[str]
    """Names of its counts; a sample whose first count is 0 has nothing to train on."""
    layout: Layout

    @abstractmethod
    def prepare(self, sample: Sample, name: str, at: StepIndex, /) -> Prepared:
        """Converts an item of the dataset for the other methods. Called in DataLoader workers.

        Raises:
            SampleError: the sample cannot be trained on; the message starts with ``name``.
        """

    @abstractmethod
    def content(self, sample: Prepared) -> tuple[Sequence[np.ndarray], Mapping[str, Any]]:
        """Returns what a resume recognizes a sample by: integers, and all other values that it gives to the training."""

    @abstractmethod
    def length(self, sample: Prepared) -> int:
        """Returns the value that the plan takes for a sample: its length, or for views its position."""

    @abstractmethod
    def collate(self, samples: Sequence[Prepared], share: Share = WHOLE) -> list[Microbatch]:
        """Makes the microbatch of some samples, or several, if one is too long for the budget.

        Called with a ``share`` only if the plan has several ranks compute the row of these samples together.
        """

    @abstractmethod
    def dummy(self, sample: Prepared) -> Microbatch:
        """Makes a dummy microbatch, whose loss is zero and has a graph.

        Ranks with fewer microbatches run it, so that FSDP's collectives match.
        """

    @property
    def noun(self) -> str:
        """Name of a sample in messages."""
        of_several = [noun for noun in ("pair", "group") if f"{noun}s" in self.counts]
        return [*of_several, "image" if self.counts[0] == "images" else "sample"][0]

    def with_budget(self, max_tokens: int) -> Self:
        """Returns a collator of microbatches of at most ``max_tokens``, if their tokens are bounded."""
        return self

    def remarks(self, sample: Prepared | None = None) -> Iterator[str]:
        """Yields doubts about a prepared sample, as texts that are counted; without one, warnings before training."""
        yield from ()
