"""Text as a kind of sample: checked, measured, and made into microbatches, padded or packed.

Shapes: b samples, s slots (positions) per sample, n target tokens.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from torchtune.utils import get_logger, log_rank_zero

from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.plan import make_plan
from recipe_utils.data.loader.samples import Sample, SampleError, check_keys, whole_numbers
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.text.collate import (
    Collate,
    collate_empty_microbatch,
    collate_microbatch,
    collate_packed_microbatch,
    num_targets_of,
)
from recipe_utils.data.text.limits import ModelLimits, row_multiple_of_packed
from recipe_utils.settings.components import component_at

_TEXT_KEYS = {"tokens", "labels", "mask", "input_pos", "seq_lens"}

_log = get_logger("INFO")


class KnownOfSamples(Protocol):
    """What another model is known to say of samples."""

    def find(self, samples: Sequence[Sample], num_targets: Sequence[int], /) -> Any:
        """What it says of all their targets, one sample's after the other's; tensors in any nesting."""


class TextCollator:
    """Text, of which an update step counts target tokens.

    Args:
        settings: of the data; the plan, and what limits a microbatch.
        tokenizer: has ``pad_id`` and, if it truncates samples, ``max_seq_len``.
        ignore_index: the label of positions that are no targets.
        limits: of the model.
        known: what a teacher says, if that is kept; None if there is none, or it is asked later.

    Raises:
        recipe_utils.settings.settings.ConfigError: ``microbatching: packed`` cannot be with this model.
    """

    counts = ("target_tokens", "real_tokens", "positions")
    """What a microbatch counts: targets, tokens that are no padding, positions that are computed."""
    fingerprint_keys = ("tokens", "labels")

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: Any,
        ignore_index: int,
        limits: ModelLimits,
        known: KnownOfSamples | None = None,
    ) -> None:
        self._of_validation = partial(
            TextCollator, settings.of_validation(), tokenizer, ignore_index, limits
        )
        self._known = known
        self.ignore_index = ignore_index
        self.limits = limits
        self.max_seq_len: int | None = getattr(tokenizer, "max_seq_len", None)
        self._max_tokens_per_microbatch = max_tokens = settings.max_tokens_per_microbatch
        most_samples = max(settings.batch_size, settings.batch_size_val or 0)
        self.longest_row = limits.longest_row(max_tokens, most_samples)
        """Bound on a row, padding included, in validation, too [slots]."""
        if max_tokens is None and self.max_seq_len is not None:
            max_tokens = settings.batch_size * self.max_seq_len
        cost = settings.cost(limits.cost)
        self.plan = make_plan(settings.microbatching, settings.batch_size, max_tokens, cost)
        self._warnings_of_costs = list(settings.warns_of_costs(limits.costs_are_estimated))

        self._is_packed = settings.microbatching == "packed"
        self._has_said_what_is_ignored = False
        self._collate: Collate
        if self._is_packed:
            row_multiple = row_multiple_of_packed(limits, max_tokens)
            self._collate = partial(
                collate_packed_microbatch,
                ignore_index=ignore_index,
                padding_idx=tokenizer.pad_id,
                row_multiple=row_multiple,
            )
        else:
            collate_fn = component_at(settings.collate_fn)
            self._collate = partial(
                collate_microbatch,
                collate_fn=partial(
                    collate_fn, padding_idx=tokenizer.pad_id, ignore_idx=ignore_index
                ),
                ignore_index=ignore_index,
                merge_packed_rows=limits.other_attention is None and limits.num_row_lengths is None,
            )

    def __getstate__(self) -> dict[str, Any]:
        # DataLoader workers only prepare samples.
        return {**self.__dict__, "_known": None, "_of_validation": None}

    def for_validation(self) -> "TextCollator":
        """The same for the validation loader: ``batch_size_val`` samples per microbatch."""
        return self._of_validation(known=self._known)

    def warnings(self) -> Iterator[str]:
        """Whether samples may be longer than a microbatch, and whether plans rest on guesses."""
        yield from self._warnings_of_costs
        bound = self._max_tokens_per_microbatch
        if bound is not None and (self.max_seq_len is None or bound < self.max_seq_len):
            yield (
                f"max_tokens_per_microbatch={bound}: a sample with more tokens "
                f"(tokenizer.max_seq_len={self.max_seq_len}) gets a microbatch of its own"
            )

    def prepare(self, sample: Sample, name: str) -> Sample:
        """The sample as it is; refuses one that cannot be trained on, see :func:`check_sample`."""
        limits = self.limits
        check_sample(
            sample,
            name,
            self.ignore_index,
            limits.vocab_size,
            limits.max_seq_len,
            limits.limits_length,
        )
        return sample

    def length(self, sample: Sample) -> int:
        """Tokens of a sample, by which it is planned."""
        return len(sample["tokens"])

    def collate(self, samples: Sequence[Sample]) -> Microbatch:
        """One microbatch of samples, at least one; with what is known of a teacher's word."""
        if not self._has_said_what_is_ignored:
            self._say_what_is_ignored(samples[0])
        microbatch = self._collate(samples)
        if self._known is None:
            return microbatch
        num_targets = [num_targets_of(sample, self.ignore_index) for sample in samples]
        return microbatch.with_teacher(self._known.find(samples, num_targets))

    def _say_what_is_ignored(self, sample: Sample) -> None:
        self._has_said_what_is_ignored = True
        ignored = sorted(map(str, sample.keys() - _TEXT_KEYS))
        if ignored and self._is_packed:
            log_rank_zero(
                _log,
                f"microbatching=packed: rows hold text only; of samples {', '.join(ignored)} is ignored",
                logging.WARNING,
            )

    def dummy(self, sample: Sample) -> Microbatch:
        """See :func:`collate_empty_microbatch`."""
        if self._is_packed:
            sample = {key: value for key, value in sample.items() if key in _TEXT_KEYS}
        return collate_empty_microbatch(sample, self._collate, self.ignore_index)


def check_sample(
    sample: Sample,
    name: str,
    ignore_index: int,
    vocab_size: int,
    max_seq_len: int,
    limits_length: str = "the model's",
) -> None:
    """Refuses a sample that would be trained on wrongly or would fail deep inside the model.

    Args:
        sample: what the dataset returned.
        name: how the error calls it, such as ``"sample 17 of dataset"``.
        ignore_index: the label of positions that are no targets.
        vocab_size: number of token embeddings of the model.
        max_seq_len: longest sequence the model takes [tokens].
        limits_length: whose it is.

    Raises:
        SampleError: no mapping, no whole numbers, other than one label per token, no tokens, more than
            ``max_seq_len`` tokens, or a token or label outside the vocabulary.
    """
    check_keys(sample, ("tokens", "labels"), name)
    tokens, labels = (whole_numbers(sample, key, name) for key in ("tokens", "labels"))
    num_tokens, num_labels = len(tokens), len(labels)
    if num_tokens == 0:
        raise SampleError(f"{name}: it has no tokens; filter empty samples out of the dataset")
    if num_tokens != num_labels:
        raise SampleError(f"{name}: {num_labels} labels for {num_tokens} tokens; give one each")
    if num_tokens > max_seq_len:
        raise SampleError(
            f"{name}: {num_tokens} tokens are more than {limits_length} max_seq_len={max_seq_len}; set "
            f"tokenizer.max_seq_len={max_seq_len} to truncate samples"
        )
    targets = labels[labels != ignore_index]
    for what, ids in (("token", tokens), ("label", targets)):
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise SampleError(
                f"{name}: {what} {outside[0]} is outside the model's vocabulary of "
                f"{vocab_size}; use the tokenizer that belongs to the model"
            )
