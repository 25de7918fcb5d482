"""Collator of text: checks samples and makes padded or packed microbatches."""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.utils import get_logger, log_rank_zero

from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.samples import Sample, SampleError, check_keys, whole_numbers
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.plan.plan import WHOLE, Part
from recipe_utils.data.text.collate import (
    Collate,
    collate_dummy,
    collate_microbatch,
    collate_packed_microbatch,
    num_targets_of,
)
from recipe_utils.data.text.limits import ModelLimits, row_multiple_of_packed
from recipe_utils.settings.components import component_at

_TEXT_KEYS = {"tokens", "labels", "mask", "input_pos", "seq_lens", "dataset_index"}

_log = get_logger("INFO")


class TeacherCache(Protocol):
    """Cached outputs of a teacher."""

    def find(self, samples: Sequence[Sample], num_targets: Sequence[int], /) -> Any:
        """Returns the outputs at all targets, one sample after the other; tensors in any nesting."""


class TextCollator:
    """Collator of text; update steps count target tokens.

    Args:
        settings: data settings.
        tokenizer: has ``pad_id`` and, if it truncates samples, ``max_seq_len``.
        ignore_index: label of positions that are not targets.
        limits: limits of the model.
        cache: cached outputs of a teacher, added to microbatches.

    Raises:
        ConfigError: the model does not support ``microbatching: packed``.
    """

    counts: Sequence[str] = ("target_tokens", "real_tokens", "positions")
    """Counts; real tokens exclude padding, positions include it; also samples in rows of several ranks."""
    fingerprint_keys = ("tokens", "labels")

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: Any,
        ignore_index: int,
        limits: ModelLimits,
        cache: TeacherCache | None = None,
    ) -> None:
        self._of_validation = partial(
            TextCollator, settings.of_validation(), tokenizer, ignore_index, limits
        )
        self._cache = cache
        self._ignore_index = ignore_index
        self._limits = limits
        if settings.max_ranks_per_row > 1:
            self.counts = (*self.counts, "spanning_samples")
        self._max_ranks_per_row = settings.max_ranks_per_row
        self._max_seq_len: int | None = getattr(tokenizer, "max_seq_len", None)
        self._max_tokens = max_tokens = settings.max_tokens_per_microbatch
        most_samples = max(settings.batch_size, settings.batch_size_val or 0)
        self.longest_row = limits.longest_row(max_tokens, most_samples)
        """Upper bound of a row, padding included, also in validation [positions]."""
        if max_tokens is None and self._max_seq_len is not None:
            max_tokens = settings.batch_size * self._max_seq_len
        self.plan = settings.make_plan(max_tokens, settings.cost(limits.cost))
        self._cost_warnings = list(settings.cost_warnings(limits.costs_are_estimated))

        self._is_packed = settings.is_packed
        self._has_own_positions = settings.collate_fn == DataSettings.collate_fn
        self._is_stock_collate_fn = settings.collate_fn.startswith("torchtune.")
        self._has_warned = False
        self._collate: Collate
        if self._is_packed:
            self._collate = partial(
                collate_packed_microbatch,
                ignore_index=ignore_index,
                padding_idx=tokenizer.pad_id,
                row_multiple=row_multiple_of_packed(limits, max_tokens, settings.max_ranks_per_row),
            )
        else:
            pad = component_at(settings.collate_fn)
            self._collate = partial(
                collate_microbatch,
                collate_fn=partial(pad, padding_idx=tokenizer.pad_id, ignore_idx=ignore_index),
                ignore_index=ignore_index,
                merge_packed_rows=limits.other_attention is None and limits.num_row_lengths is None,
            )

    def __getstate__(self) -> dict[str, Any]:
        """Omits what DataLoader workers, which only prepare samples, do not use."""
        return {**self.__dict__, "_cache": None, "_of_validation": None}

    def for_validation(self) -> "TextCollator":
        """Returns a collator for the validation loader: ``batch_size_val`` samples per microbatch."""
        return self._of_validation(self._cache)

    def warnings(self) -> Iterator[str]:
        """Yields warnings about estimated costs and about samples longer than a microbatch."""
        yield from self._cost_warnings
        bound, longest, most = self._max_tokens, self._max_seq_len, self._max_ranks_per_row
        if bound is not None and (longest is None or most * bound < longest):
            on_most, more = "", f"a sample with more tokens (tokenizer.max_seq_len={longest})"
            if most > 1:
                on_most, more = (
                    f", max_ranks_per_row={most}",
                    more.replace("more", f"more than {most * bound}"),
                )
            yield f"max_tokens_per_microbatch={bound}{on_most}: {more} gets a microbatch of its own"

    def remarks(self, sample: Sample) -> Iterator[str]:
        """Yields whether a sample, not of a packed dataset, is truncated or needs several ranks."""
        if "seq_lens" in sample:
            return
        if len(sample["tokens"]) == self._max_seq_len:
            yield f"tokenizer.max_seq_len={self._max_seq_len} tokens, probably truncated"
        if self._max_ranks_per_row > 1 and len(sample["tokens"]) > (self._max_tokens or 0):
            yield f"more than {self._max_tokens} tokens, computed by several ranks"

    def prepare(self, sample: Sample, name: str) -> Sample:
        """Returns the sample with tokens and labels as int64 arrays, without torchtune's ``mask``.

        A ``collate_fn`` of the user's gets the types of the dataset, such as lists, as it does in torchtune.
        """
        tokens, labels = check_sample(sample, name, self._ignore_index, self._limits)
        if self._has_own_positions and "input_pos" in sample and "seq_lens" not in sample:
            text = "only samples with 'seq_lens', of packed datasets, set positions; remove it"
            raise SampleError(f"{name}: it has 'input_pos'; {text}")
        arrays = {"tokens": tokens, "labels": labels}
        if self._is_stock_collate_fn:
            # DataLoader workers would pickle lists of NumPy integers longer than they tokenize.
            return {key: value for key, value in {**sample, **arrays}.items() if key != "mask"}
        # PyTorch lacks operations for uint16, the type of many memory-mapped tokens.
        others = [key for key in arrays if np.asarray(sample[key][:1]).dtype != np.int64]
        return {**sample, **{key: arrays[key] for key in others}}

    def length(self, sample: Sample) -> int:
        """Returns the number of tokens."""
        return len(sample["tokens"])

    def collate(self, samples: Sequence[Sample], part: Part = WHOLE) -> Microbatch:
        """Makes a microbatch of at least one sample, with cached teacher outputs, or a part of it."""
        if self._is_packed and not self._has_warned:
            self._has_warned = True
            ignored = ", ".join(sorted(map(str, samples[0].keys() - _TEXT_KEYS)))
            if ignored:
                text = f"rows contain only text; {ignored} of samples is ignored"
                log_rank_zero(_log, f"microbatching=packed: {text}", logging.WARNING)
        if part != WHOLE:
            return self._collate(samples, part=part)
        microbatch = self._collate(samples)
        if self._cache is None:
            return microbatch
        num_targets = [num_targets_of(sample, self._ignore_index) for sample in samples]
        return microbatch.with_teacher(self._cache.find(samples, num_targets))

    def dummy(self, sample: Sample) -> Microbatch:
        """Makes a dummy microbatch, see :func:`recipe_utils.data.text.collate.collate_dummy`."""
        if self._is_packed:
            sample = {key: value for key, value in sample.items() if key in _TEXT_KEYS}
        return collate_dummy(sample, self._collate, self._ignore_index)


def check_sample(
    sample: Sample, name: str, ignore_index: int, limits: ModelLimits
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and labels, [n] int64 each, after checking that they can be trained on.

    Raises:
        SampleError: not a mapping, not integers, not one label per token, no tokens, more than
            ``max_seq_len`` tokens, or a token or label outside the vocabulary.
    """
    check_keys(sample, ("tokens", "labels"), name)
    tokens, labels = (whole_numbers(sample, key, name) for key in ("tokens", "labels"))
    num_tokens, num_labels = len(tokens), len(labels)
    if num_tokens == 0:
        raise SampleError(f"{name}: it has no tokens; filter empty samples out of the dataset")
    if num_tokens != num_labels:
        raise SampleError(
            f"{name}: {num_labels} labels for {num_tokens} tokens; each token needs one"
        )
    if num_tokens > limits.max_seq_len:
        raise SampleError(
            f"{name}: {num_tokens} tokens are more than {limits.limits_length} "
            f"max_seq_len={limits.max_seq_len}; set tokenizer.max_seq_len={limits.max_seq_len} to truncate samples"
        )
    targets = labels[labels != ignore_index]
    for what, ids in (("token", tokens), ("label", targets)):
        outside = ids[(ids < 0) | (ids >= limits.vocab_size)]
        if len(outside):
            instead = "use the tokenizer that belongs to the model"
            if outside[0] == CROSS_ENTROPY_IGNORE_IDX:
                instead = f"set loss.ignore_index={CROSS_ENTROPY_IGNORE_IDX}"
            raise SampleError(
                f"{name}: {what} {outside[0]} is outside the model's vocabulary of {limits.vocab_size}; {instead}"
            )
    return tokens, labels
