"""Samples of text: tokens, what stands beside each of them, and what belongs to the sample.

A sample of 5 tokens whose last two are an answer, with ``advantages`` declared by the loss and ``rewards`` by a recipe::

    tokens       12   7  31   4   9
    labels     -100 -100 -100   4   9      beside the token that they name
    advantages    0   0   0  .5  .5      a column: beside the label
    rewards      [1.0]                   a value of the sample, of any fixed shape

Two answers to one prompt, ``{"sequences": [...]}``, are one sample of two sequences: a tree that computes the prompt
once, with the columns of both answers and the values [2] of both.

Shapes: t tokens, q sequences of a sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from recipe_utils.text.documents import Document, length_of
from recipe_utils.update_steps.order import StepIndex
from recipe_utils.update_steps.samples import Sample

Columns = Mapping[str, np.ndarray]

FIRST = StepIndex(0)
"""Place of a sample that is read outside of a training."""


class TextSample(NamedTuple):
    """Sample of text as collators lay it out."""

    name: str
    """Name for errors, such as ``sample 17 of dataset``."""
    at: StepIndex
    tokens: np.ndarray
    """[t] int64."""
    labels: np.ndarray
    """[t] int64, beside their tokens; in a tree, beside the token after the position that predicts them."""
    documents: Sequence[Document]
    columns: Mapping[str, np.ndarray] = {}
    """[t] fp64 each, beside labels; without those that the dataset left out."""
    values: Mapping[str, np.ndarray] = {}
    """[q, ...] each."""
    sequences: tuple[np.ndarray, np.ndarray] | None = None
    """Of a tree or of padded tokens: the sequence [t] of each position, -1 for padding, and the index [q] of each
    sequence's last token. None: each document is one."""
    positions: np.ndarray | None = None
    """[t]; None if they count from 0 in each document."""
    num_shared: Sequence[int] = ()
    """Of each tree, the positions that it saves."""
    others: Mapping[str, Any] = {}
    """What else the dataset returned, for a ``collate_fn``."""

    @property
    def is_row(self) -> bool:
        """Returns True for a row of a packed dataset, whose documents stay in one row also if padded."""
        return "seq_lens" in self.others

    def owners_and_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sequence [t] of each position, -1 for padding, and the index [q] of each one's last token."""
        if self.sequences is not None:
            return self.sequences
        lengths = np.array([length_of(document) for document in self.documents])
        return np.repeat(np.arange(len(lengths)), lengths), lengths.cumsum() - 1


class Reader(Protocol):
    """Checks of the samples of one objective in text, and what it counts; DataLoader workers have a copy of it."""

    @property
    def noun(self) -> str:
        """Name of a sample, for warnings."""

    @property
    def ignore_index(self) -> int:
        """Label of positions that are not targets."""

    @property
    def columns(self) -> Mapping[str, float | None]:
        """Default of each column; None if a sample without it is an error."""

    @property
    def totals(self) -> Sequence[str]:
        """Names of columns and values whose sums are counts."""

    @property
    def counts(self) -> Sequence[str]:
        """Names of its counts, first the one without which a sample is not trained on."""

    @property
    def num_rows(self) -> int:
        """Rows of a sample if padded; the plan counts them as one."""

    def prepare(self, sample: Sample, name: str, at: StepIndex) -> TextSample:
        """See :meth:`recipe_utils.update_steps.objective.Collator.prepare`."""

    def content(self, sample: TextSample) -> tuple[Sequence[np.ndarray], Mapping[str, Any]]:
        """See :meth:`recipe_utils.update_steps.objective.Collator.content`."""

    def remarks(self, sample: TextSample) -> Iterator[str]:
        """See :meth:`recipe_utils.update_steps.objective.Collator.remarks`."""

    def count(self, counts: Mapping[str, float], values: Columns) -> Mapping[str, float]:
        """Returns the counts of a microbatch, given those of any text and the values [p, ...] of its sequences."""
