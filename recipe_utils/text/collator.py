"""Collators of text: plans and layouts of the microbatches of samples that are sequences of tokens."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Self

import numpy as np
import torch

import recipe_utils.text.torchtune_messages  # noqa: F401  corrects torchtune
from recipe_utils.settings.components import component_at
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.text.documents import length_of
from recipe_utils.text.limits import NO_LIMITS, ModelLimits
from recipe_utils.text.reader import KNOWN_KEYS, TextReader
from recipe_utils.text.rows import collated, packed, padded
from recipe_utils.text.samples import TextSample
from recipe_utils.text.trees import apart, share_beginnings, split_trees
from recipe_utils.torchtune_names import IGNORE_INDEX, log_rank_zero
from recipe_utils.update_steps.objective import NOTHING_DECLARED, Collator, Declaration, Layout
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import Microbatch

FIRST_TOKENS = 2048
"""First budget of a search. Small for any model that needs a GPU; the same on all ranks."""
MOST_TOKENS = 2**20
"""Largest budget of a search."""


@dataclass(frozen=True)
class RowCollator(Collator):
    """Collator of samples that are sequences of tokens, in padded or packed rows.

    Raises ConfigError if the model does not support ``microbatching: packed``, or rows of trees.
    """

    settings: DataSettings
    """With ``max_tokens_per_microbatch: auto`` the first budget is FIRST_TOKENS."""
    reader: TextReader
    tokenizer: Any
    """Has ``pad_id``."""
    trees: tuple[str, str] | None = None
    """If packed rows have trees, the ``key=value`` that makes them and what to set instead."""
    shares: bool = False
    """Samples of a packed row that begin with the same tokens may become one tree."""
    is_searched: bool = False
    """The budget is found while training."""
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        if self.settings.max_tokens_per_microbatch == "auto":
            object.__setattr__(self, "is_searched", True)
            object.__setattr__(self, "settings", replace(self.settings, max_tokens_per_microbatch=FIRST_TOKENS))
        object.__setattr__(self, "layout", self._layout())

    def _layout(self) -> Layout:
        """Returns the plan of this budget, and the divisor of the lengths of packed rows."""
        settings, reader, bound = self.settings, self.reader, self.max_tokens
        limits, max_seq_len = reader.limits, reader.max_seq_len
        if (max_seq_len or 0) > limits.max_seq_len:
            text = f"longer samples than {limits.limits_length} max_seq_len={limits.max_seq_len} fail"
            text += f"; set it to {limits.max_seq_len} to truncate them"
            raise ConfigError(Problem("tokenizer.max_seq_len", text, max_seq_len))
        if bound is None and max_seq_len is not None:
            bound = reader.num_rows * settings.batch_size * max_seq_len
        if not settings.is_packed:
            return Layout(settings.make_plan(bound, limits.cost, reader.num_rows), settings.moves_samples)
        multiple = limits.multiple_of_packed_rows(bound, self.trees, settings.max_ranks_per_row)
        if reader.most_positions is not None:
            bound = tree_bound(settings, self.max_tokens, max_seq_len or limits.max_seq_len)
        plan = settings.make_plan(bound, limits.cost, fills_rows=multiple != limits.row_multiple)
        return Layout(plan, settings.moves_samples, row_multiple=multiple)

    # ---- Budget -----------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int | None:
        """Returns ``max_tokens_per_microbatch``, a number for each collator."""
        bound = self.settings.max_tokens_per_microbatch
        assert bound != "auto"
        return bound

    @property
    def longest_row(self) -> int:
        """Returns an upper bound of a row, padding included, also in validation and with any budget [positions]."""
        settings, limits = self.settings, self.reader.limits
        # A row longer than the budget is one sample, padded to a multiple below the budget.
        most_tokens = 2 * MOST_TOKENS if self.is_searched else self.max_tokens
        most_samples = self.reader.num_rows * max(settings.batch_size, settings.batch_size_val or 0)
        longest = (most_tokens or 0) + most_samples * limits.max_seq_len + (limits.row_multiple or 0)
        return max(longest, (self.reader.most_positions or 0) + (self.layout.row_multiple or 0))

    @property
    def has_few_lengths(self) -> bool:
        """Returns True if packed rows have few lengths, for which kernels are compiled."""
        return self.settings.is_packed and self.layout.row_multiple != self.reader.limits.row_multiple

    def with_budget(self, max_tokens: int) -> Self:
        """Returns a collator of microbatches of at most ``max_tokens``, including padding of packed rows.

        If ``max_tokens`` is below the multiple that rows are padded to, it excludes padding.
        """
        step = self.reader.limits.row_multiple or 1
        for bound in (max_tokens, *range(max_tokens // step * step, 0, -step)):
            other = replace(self, settings=replace(self.settings, max_tokens_per_microbatch=bound))
            if bound % (other.layout.row_multiple or 1) == 0:
                return other
        return replace(self, settings=replace(self.settings, max_tokens_per_microbatch=max_tokens))

    # ---- Samples ----------------------------------------------------------------------------------

    @property
    def counts(self) -> Sequence[str]:  # type: ignore[override]
        """Names of counts; also samples in rows of several ranks, and tokens of trees that are not computed again."""
        spanning = ("spanning_samples",) if self.settings.max_ranks_per_row > 1 else ()
        shared = ("shared_tokens",) if self.shares or self.reader.most_positions is not None else ()
        return tuple(dict.fromkeys((*self.reader.counts, *spanning, *shared)))

    @property
    def prepare(self) -> Any:
        """The reader's own method, so that DataLoader workers have no copy of settings and plan."""
        return self.reader.prepare

    def content(self, sample: TextSample) -> tuple[Sequence[np.ndarray], Mapping[str, Any]]:
        """Returns tokens and labels, and all other values that are trained on, by key."""
        return self.reader.content(sample)

    def remarks(self, sample: TextSample | None = None) -> Iterator[str]:
        """Yields doubts about a sample; without one, a warning about samples longer than a microbatch."""
        longest, num_rows, bound = self.reader.max_seq_len, self.reader.num_rows, self.max_tokens
        most = self.settings.max_ranks_per_row
        if sample is not None:
            yield from self.reader.remarks(sample)
        elif not self.is_searched and bound is not None and (longest is None or most * bound < num_rows * longest):
            on_most = f", max_ranks_per_row={most}" if most > 1 else ""
            more = f"more than {most * bound} tokens" if most > 1 else "more tokens"
            yield (
                f"max_tokens_per_microbatch={bound}{on_most}: a {self.reader.noun} with {more} ("
                f"{'twice ' * (num_rows == 2)}tokenizer.max_seq_len={longest}) gets a microbatch of its own"
            )

    def length(self, sample: TextSample) -> int:
        """Returns the positions of a sample in a packed row; if padded, those of its longest row."""
        if self.settings.is_packed or len(sample.documents) == 1 or sample.is_row:
            return len(sample.tokens)
        return max(map(length_of, sample.documents))

    def collate(self, samples: Sequence[TextSample]) -> list[Microbatch]:
        """Makes a microbatch of at least one sample, or one of each tree that a sample was cut into."""
        settings = self.settings
        if settings.is_packed or settings.collate_fn.startswith("torchtune."):
            _warn_once(settings.microbatching, ", ".join(sorted(map(str, self._unknown_keys(samples[0])))))
        if len(samples) == 1 and len(samples[0].num_shared) > 1:
            return [self._row([tree]) for tree in split_trees(samples[0])]
        return [self._row(samples)]

    def _row(self, samples: Sequence[TextSample]) -> Microbatch:
        """Lays samples out, see :mod:`recipe_utils.text.rows`."""
        settings = self.settings
        if settings.is_packed or (samples[0].is_row and self.reader.limits.merges_rows):
            # A packed dataset's own padding is removed.
            whole = [sample.without_padding() for sample in samples]
            share = partial(share_beginnings, ignore_index=self.reader.ignore_index) if self.shares else apart
            return packed(share(whole), self.reader, self.tokenizer.pad_id, self.layout.row_multiple)
        if samples[0].is_row or settings.collate_fn == DataSettings.collate_fn:
            return padded(samples, self.reader, self.tokenizer.pad_id)
        names = {"padding_idx": self.tokenizer.pad_id, "ignore_idx": self.reader.ignore_index}
        return collated(samples, self.reader, partial(component_at(settings.collate_fn), **names))

    def dummy(self, sample: TextSample) -> Microbatch:
        """Makes a dummy microbatch: a sample whose targets are all ignored, without any sequence.

        Its loss is zero, with a graph through every parameter. Plain text and trees are cut to one token;
        other samples (images, rows of a packed dataset) keep their shape.
        """
        keeps_shape = not self.settings.is_packed and (sample.is_row or self._unknown_keys(sample))
        num_kept = len(sample.tokens) if keeps_shape else 1
        labels = np.full(num_kept, self.reader.ignore_index)
        own = {"labels": labels.tolist()}  # for a user's collate_fn
        dummy = sample._replace(labels=labels, columns={}, others={**sample.others, **own})
        if not keeps_shape:
            own["tokens"] = sample.tokens[:1].tolist()
            dummy = TextSample(sample.name, sample.at, sample.tokens[:1], labels, [1], values=sample.values, others=own)
        made = self._row([dummy])
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
def _warn_once(microbatching: str, keys: str) -> None:
    if keys:
        text = f"microbatching={microbatching}: rows contain only text; {keys} of samples is ignored"
        log_rank_zero(text, logging.WARNING)


def text_collator(
    settings: DataSettings,
    tokenizer: Any,
    ignore_index: int = IGNORE_INDEX,
    limits: ModelLimits = NO_LIMITS,
    has_trees: bool = False,
    declared: Declaration = NOTHING_DECLARED,
    shares_beginnings: bool = True,
) -> RowCollator:
    """Returns the collator of text, whose update steps count target tokens.

    Args:
        settings: data settings.
        tokenizer: has ``pad_id`` and, if it truncates samples, ``max_seq_len``.
        ignore_index: label of positions that are not targets.
        limits: limits of the model; by default none.
        has_trees: accepts samples with ``sequences``.
        declared: columns and values of samples that a loss takes.
        shares_beginnings: samples of a packed row that begin alike may become one tree. False for objectives that take
            other positions than targets, such as noise by sample: a position that is shared exists once.

    Raises:
        ConfigError: the model does not support ``microbatching: packed``, or rows of trees; or ``declared`` is divided
            by something that is not counted.
    """
    if has_trees and not settings.is_packed:
        text = "sequences that share a beginning need rows of documents; set microbatching=packed"
        text += ", or dataset.split_turns=True"
        raise ConfigError(Problem("microbatching", text, settings.microbatching))
    max_tokens, is_alone = settings.max_tokens_per_microbatch, settings.max_ranks_per_row == 1
    max_seq_len = getattr(tokenizer, "max_seq_len", None)
    if declared.of_samples and not is_alone:
        text = (
            f"the loss takes values of samples ({', '.join(declared.of_samples)}), which a share of a row does not have"
        )
        raise ConfigError(Problem("max_ranks_per_row", f"{text}; remove it", settings.max_ranks_per_row))
    most_positions = None
    if has_trees:
        # Trees are cut when they are read, before the budget of their update step is known.
        bound = None if max_tokens == "auto" else max_tokens
        most_positions = tree_bound(settings, bound, max_seq_len or limits.max_seq_len) * settings.max_ranks_per_row
    ends = {getattr(tokenizer, "eos_id", None), *(getattr(tokenizer, "stop_tokens", None) or ())}
    reader = TextReader(
        ignore_index,
        limits,
        declared.columns,
        declared.of_samples,
        tuple(name for name in declared.totals if name in {*declared.columns, *declared.of_samples}),
        max_seq_len,
        frozenset(ends - {None}),
        most_positions,
        splits=is_alone,  # else ranks would wait for another row
        spans=None if is_alone or max_tokens == "auto" else max_tokens or 0,
        keeps_types=not settings.collate_fn.startswith("torchtune."),
        has_own_positions=settings.collate_fn == DataSettings.collate_fn,
    )
    shares = settings.is_packed and is_alone and shares_beginnings and limits.shares_beginnings
    trees = ("split_turns=shared", "set dataset.split_turns=True") if has_trees else None
    collator = RowCollator(settings, reader, tokenizer, trees, shares)
    if declared.divisor not in collator.counts:
        names = ", ".join(collator.counts)
        raise ConfigError(f"loss: its divisor {declared.divisor} is no count; set it to a column, or one of {names}")
    return collator


def tree_bound(settings: DataSettings, max_tokens: int | None, longest: int) -> int:
    """Returns the positions of a tree, of which a sample may need several; ``longest`` are those of a sample."""
    return max_tokens or settings.batch_size * longest
