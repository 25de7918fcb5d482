"""Collators of text: plans and layouts of the microbatches of samples that are sequences of tokens."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Self

import numpy as np
import torch

from recipe_utils.plans.microbatching import MicrobatchSettings
from recipe_utils.plans.rounds import WHOLE, Share
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.text.documents import length_of
from recipe_utils.text.limits import RowBounds
from recipe_utils.text.reader import KNOWN_KEYS, TextReader
from recipe_utils.text.row_tensors import CollateFn, collated, packed, padded, share_of_row
from recipe_utils.text.samples import TextSample
from recipe_utils.text.trees import apart, share_beginnings, split_trees
from recipe_utils.torchtune_names import log_rank_zero
from recipe_utils.update_steps.objective import Collator, Layout
from recipe_utils.update_steps.step import Microbatch


@dataclass(frozen=True)
class RowCollator(Collator):
    """Collator of samples that are sequences of tokens, in padded or packed rows.

    Raises ConfigError if the model does not support ``microbatching: packed``, or rows of trees.
    """

    settings: MicrobatchSettings
    """Config keys of the plan."""
    reader: TextReader = field(default_factory=TextReader)
    pad_id: int = 0
    """Token of padding."""
    trees: tuple[str, str] | None = None
    """If packed rows have trees, the ``key=value`` that makes them and what to set instead."""
    shares: bool = False
    """Samples of a packed row that begin with the same tokens may become one tree."""
    collate_fn: CollateFn | None = None
    """Pads the samples of a microbatch, as torchtune's do; None for rows of the samples' documents."""
    budget: int | None = None
    """Positions per microbatch in place of ``max_tokens_per_microbatch``, as a search finds them."""
    layout: Layout = field(init=False)
    bounds: RowBounds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", self.reader.bounds._replace(settings=self.settings, budget=self.budget))
        object.__setattr__(self, "layout", self._layout())

    def _layout(self) -> Layout:
        """Returns the plan of this budget, and what the lengths of packed rows are multiples of."""
        settings, bound = self.settings, self.bounds.of_microbatch
        limits, max_seq_len = self.bounds.limits, self.bounds.max_seq_len
        if (max_seq_len or 0) > limits.max_seq_len:
            text = f"longer samples than {limits.limits_length} max_seq_len={limits.max_seq_len} fail"
            text += f"; set it to {limits.max_seq_len} to truncate them"
            raise ConfigError(Problem("tokenizer.max_seq_len", text, max_seq_len))
        if not settings.is_packed:
            return Layout(settings.make_plan(bound, limits.cost, self.bounds.num_rows), settings.moves_samples)
        multiple = limits.multiple_of_packed_rows(bound, self.trees, settings.max_ranks_per_row)
        if bound is None and self.reader.has_trees and not self.reader.couples_sequences:
            bound = settings.batch_size * limits.max_seq_len
        plan = settings.make_plan(bound, limits.cost, fills_rows=multiple != limits.row_multiple)
        return Layout(plan, settings.moves_samples, row_multiple=multiple)

    # ---- Budget -----------------------------------------------------------------------------------

    @property
    def longest_row(self) -> int:
        """Returns an upper bound of a row, padding included, also in validation and with any budget [positions]."""
        of_tree = self.reader.bounds.of_tree if self.reader.has_trees else 0
        if self.reader.couples_sequences and self.bounds.num_rows == 1:  # with any number of sequences
            return sys.maxsize // 2
        return max(self.bounds.of_row, of_tree + (self.layout.row_multiple or 0))

    @property
    def has_few_lengths(self) -> bool:
        """Returns True if packed rows have few lengths, for which kernels are compiled."""
        return self.settings.is_packed and self.layout.row_multiple != self.bounds.limits.row_multiple

    def with_budget(self, max_tokens: int) -> Self:
        """Returns a collator of microbatches of at most ``max_tokens``, including padding of packed rows.

        If ``max_tokens`` is below the multiple that rows are padded to, it excludes padding.
        """
        step = self.bounds.limits.row_multiple or 1
        for bound in (max_tokens, *range(max_tokens // step * step, 0, -step)):
            other = replace(self, budget=bound)
            if bound % (other.layout.row_multiple or 1) == 0:
                return other
        return replace(self, budget=max_tokens)

    # ---- Samples ----------------------------------------------------------------------------------

    @property
    def counts(self) -> Sequence[str]:  # type: ignore[override]
        """Names of counts; also samples in rows of several ranks, and tokens of trees that are not computed again."""
        spanning = ("spanning_samples",) if self.settings.max_ranks_per_row > 1 else ()
        shared = ("shared_tokens",) if self.shares or self.reader.has_trees else ()
        return tuple(dict.fromkeys((*self.reader.counts, *spanning, *shared)))

    @property
    def prepare(self) -> Any:
        """The reader's own method, so that DataLoader workers have no copy of the plan."""
        return self.reader.prepare

    def content(self, sample: TextSample) -> tuple[Sequence[np.ndarray], Mapping[str, Any]]:
        """Returns tokens and labels, and all other values that are trained on, by key."""
        return self.reader.content(sample)

    def remarks(self, sample: TextSample | None = None) -> Iterator[str]:
        """Yields doubts about a sample; without one, a warning about samples longer than a microbatch."""
        longest, num_rows, bound = self.bounds.max_seq_len, self.bounds.num_rows, self.bounds.max_tokens
        settings, most = self.settings, self.settings.max_ranks_per_row
        if sample is not None:
            yield from self.reader.remarks(sample)
        elif not settings.is_searched and bound is not None and (longest is None or most * bound < num_rows * longest):
            on_most = f", max_ranks_per_row={most}" if most > 1 else ""
            is_cut = settings.is_packed and self.reader.has_trees and not self.reader.couples_sequences
            result = "may be cut into several microbatches" if is_cut else "gets a microbatch of its own"
            more = f"more than {most * bound} tokens" if most > 1 else "more tokens"
            yield (
                f"max_tokens_per_microbatch={bound}{on_most}: a {self.noun} with {more} ("
                f"{'twice ' * (num_rows == 2)}tokenizer.max_seq_len={longest}) {result}"
            )

    def length(self, sample: TextSample) -> int:
        """Returns the positions of a sample in a packed row; if padded, those of its longest row.

        With images, the positions of text that take as long as the tower are added: plans balance them, and budgets bound both.
        """
        of_images = 0
        if sample.images is not None:
            of_images = round(sample.images.num_values * self.bounds.limits.tokens_per_pixel)
        if self.settings.is_packed or len(sample.documents) == 1 or sample.is_row:
            return len(sample.tokens) + of_images
        return max(map(length_of, sample.documents)) + of_images

    def collate(self, samples: Sequence[TextSample], share: Share = WHOLE) -> list[Microbatch]:
        """Makes a microbatch of at least one sample, or a share of it, or one of each tree that a sample was cut into."""
        if self.settings.is_packed or not self.reader.keeps_types:
            _warn_once(", ".join(sorted(map(str, self._unknown_keys(samples[0])))))
        if (
            self.settings.is_packed
            and len(samples) == 1
            and len(samples[0].num_shared) > 1
            and not self.reader.couples_sequences
        ):
            return [self._row([tree]) for tree in split_trees(samples[0])]
        row = self._row(samples)
        return [row if share == WHOLE else share_of_row(row, share, len(samples), self.layout.row_multiple)]

    def _row(self, samples: Sequence[TextSample]) -> Microbatch:
        """Lays samples out, see :mod:`recipe_utils.text.row_tensors`."""
        if self.settings.is_packed or (samples[0].is_row and self.bounds.limits.merges_rows):
            # A packed dataset's own padding is removed.
            whole = [sample.without_padding() for sample in samples]
            share = partial(share_beginnings, ignore_index=self.reader.ignore_index) if self.shares else apart
            return packed(share(whole), self.reader, self.pad_id, self.layout.row_multiple)
        if samples[0].is_row or self.collate_fn is None:
            return padded(samples, self.reader, self.pad_id)
        names = {"padding_idx": self.pad_id, "ignore_idx": self.reader.ignore_index}
        return collated(samples, self.reader, partial(self.collate_fn, **names))

    def dummy(self, sample: TextSample) -> Microbatch:
        """Makes a dummy microbatch: a sample whose targets are all ignored, without any sequence.

        Its loss is zero, with a graph through every parameter. Plain text and trees are cut to one token;
        other samples (images, rows of a packed dataset) keep their shape.
        """
        # Fewest tokens are cheapest; what a model needs beside tokens belongs to all of them.
        keeps_shape = not self.settings.is_packed and (sample.is_row or self._unknown_keys(sample))
        num_kept = len(sample.tokens) if keeps_shape else 1
        labels = np.full(num_kept, self.reader.ignore_index)
        own = {"labels": labels.tolist()}  # for a user's collate_fn
        columns = {name: column[:num_kept] for name, column in sample.columns.items()}
        dummy = sample._replace(labels=labels, others={**sample.others, **own})
        if not keeps_shape:
            place = np.argmax(sample.keys >= 0, keepdims=True)  # a token of text: the dummy has no image
            own["tokens"] = sample.tokens[place].tolist()
            images = None if sample.images is None else sample.images.at(place)._replace(pixels=())
            dummy = TextSample(sample.name, sample.at, sample.tokens[place], labels, [1], columns)
            dummy = dummy._replace(values=sample.values, images=images, others=own)
        made = self._row([dummy])
        # Its positions belong to no sequence, so nothing of the sample reaches a loss.
        nothing = torch.zeros(0, dtype=torch.int64)
        targets = made.targets._replace(
            owners=torch.full_like(made.targets.labels, -1),
            samples=nothing,
            items=nothing,
            ends=nothing,
            of_samples={name: values[:0] for name, values in made.targets.of_samples.items()},
        )
        return Microbatch(made.inputs, targets)

    def _unknown_keys(self, sample: TextSample) -> set[str]:
        """Returns keys of the dataset's sample that rows of text do not have."""
        return sample.others.keys() - {*KNOWN_KEYS, *self.reader.columns, *sample.values}


@cache
def _warn_once(keys: str) -> None:
    if keys:
        text = f"dataset: {keys} of samples is not read: rows contain only text, and the loss does not take it"
        log_rank_zero(text, logging.WARNING)
