"""Samples of text: tokens, what stands beside each of them, and what belongs to the sample.

A sample of 5 tokens whose last two are an answer, with ``advantages`` declared by the loss and ``rewards`` by a recipe::

    tokens       12    7   31    4    9
    labels     -100 -100    4    9 -100    beside the position that predicts them; datasets return them beside their tokens
    advantages    0    0   .5   .5    0    a column: beside the label
    rewards      [1.0]                     a value of the sample, of any fixed shape

Two answers to one prompt, ``{"sequences": [...]}``, are one sample of two sequences: a tree that computes the prompt
once, with the columns of both answers and the values [2] of both.

Shapes: t tokens, q sequences of a sample.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from recipe_utils.text.documents import Document, length_of
from recipe_utils.text.images.sample import ImageInputs
from recipe_utils.update_steps.order import StepIndex
from recipe_utils.update_steps.samples import SampleError

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
    """[t] int64, of the next token of each position's sequence; ``ignore_index`` where there is no target."""
    documents: Sequence[Document]
    columns: Mapping[str, np.ndarray] = {}
    """[t] fp64 each, or [t, k], beside labels; without those that the dataset left out."""
    firsts: Mapping[str, np.ndarray] = {}
    """Labels and columns of the first token of each document, which nothing predicts: a resume knows samples by them, too."""
    values: Mapping[str, np.ndarray] = {}
    """[q, ...] each, also columns that are one number for all targets of a sequence [q]."""
    sequences: tuple[np.ndarray, np.ndarray] | None = None
    """Of a tree or of padded tokens: the sequence [t] of each position, -1 for padding, and the index [q] of each
    sequence's last token. None: each document is one."""
    positions: np.ndarray | None = None
    """[t]; None if they count from 0 in each document."""
    num_shared: Sequence[int] = ()
    """Of each tree, the positions that it saves."""
    images: ImageInputs | None = None
    """Of a model that takes images, also if the sample has none."""
    others: Mapping[str, Any] = {}
    """What else the dataset returned, for a ``collate_fn``."""

    def with_columns(self, names: Collection[str]) -> "TextSample":
        """Returns a sample whose values with these names, numbers of its sequences, are columns."""
        if not (moved := self.values.keys() & names):
            return self
        owners, _ = self.owners_and_ends()
        columns = {name: self.values[name][owners] for name in moved}
        values = {name: value for name, value in self.values.items() if name not in moved}
        return self._replace(columns={**self.columns, **columns}, values=values)

    @property
    def is_row(self) -> bool:
        """Returns True for a row of a packed dataset, whose documents stay in one row also if padded."""
        return "seq_lens" in self.others

    @property
    def keys(self) -> np.ndarray:
        """Returns tokens [t], with numbers below 0 for placeholders, which are equal if the images are."""
        return self.tokens if self.images is None else self.images.keys_of(self.tokens)

    @property
    def num_bytes(self) -> int:
        """Returns the memory of its images [bytes]."""
        pixels = [] if self.images is None else self.images.pixels
        return sum(tensor.nbytes for each in pixels for tensor in each.tensors.values())

    @property
    def num_real(self) -> int:
        """Returns the positions that are not the padding of a packed dataset, its last document."""
        is_padded = self.is_row and self.owners_and_ends()[0][-1] < 0
        return len(self.tokens) - (length_of(self.documents[-1]) if is_padded else 0)

    def without_padding(self) -> "TextSample":
        """Returns the row of a packed dataset without its padding."""
        if (end := self.num_real) == len(self.tokens):
            return self
        owners, ends = self.owners_and_ends()
        return self._replace(
            tokens=self.tokens[:end],
            labels=self.labels[:end],
            documents=self.documents[:-1],
            columns={name: column[:end] for name, column in self.columns.items()},
            sequences=(owners[:end], ends),
            positions=None if self.positions is None else self.positions[:end],
        )

    def owners_and_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sequence [t] of each position, -1 for padding, and the index [q] of each one's last token."""
        if self.sequences is not None:
            return self.sequences
        lengths = np.array([length_of(document) for document in self.documents])
        return np.repeat(np.arange(len(lengths)), lengths), lengths.cumsum() - 1


def beside_predictors(sample: TextSample, ignore_index: int) -> TextSample:
    """Returns a sample whose labels and columns stand beside their tokens with them beside the positions before."""
    starts: Any = slice(1)
    lasts: Any = slice(-1, None)
    if len(sample.documents) > 1:
        stops = np.cumsum([length_of(document) for document in sample.documents])
        starts, lasts = np.append(0, stops[:-1]), stops - 1

    def moved(column: np.ndarray, nothing: float) -> np.ndarray:
        made = np.empty_like(column)
        made[:-1] = column[1:]
        made[lasts] = nothing
        return made

    return sample._replace(
        labels=moved(sample.labels, ignore_index),
        columns={name: moved(column, 0) for name, column in sample.columns.items()},
        firsts={name: column[starts] for name, column in {"labels": sample.labels, **sample.columns}.items()},
    )


def beside_tokens(sample: TextSample, ignore_index: int) -> dict[str, np.ndarray]:
    """Returns ``labels`` and columns [t] of a sample without trees beside their tokens, as its dataset returned them."""
    starts = np.cumsum([0, *[length_of(document) for document in sample.documents[:-1]]])
    beside = dict[str, np.ndarray]()
    for name, column in {"labels": sample.labels, **sample.columns}.items():
        beside[name] = np.roll(column, 1, axis=0)
        beside[name][starts] = sample.firsts.get(name, ignore_index)
    return beside


def joined(arrays: Sequence[np.ndarray], name: str, samples: Sequence[TextSample]) -> np.ndarray:
    """Returns the values or columns ``name`` of samples, one after the other. Raises SampleError if they have several shapes."""
    for array, sample in zip(arrays, samples, strict=True):
        if array.shape[1:] != arrays[0].shape[1:]:
            shapes = f"{list(array.shape[1:])}, and that of {samples[0].name} {list(arrays[0].shape[1:])}"
            raise SampleError(f"{sample.name}: its {name} has the shape {shapes}; all samples need the same")
    return np.concatenate(arrays)
