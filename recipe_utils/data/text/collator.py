"""Text as a kind of sample: checked, measured, and made into microbatches, padded or packed.

Shapes: b samples, s slots (positions) per sample, n target tokens.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torchtune.utils import get_logger, log_rank_zero

from recipe_utils.data.loader.loader import DataSettings
from recipe_utils.data.loader.microbatch import Microbatch, Targets
from recipe_utils.data.loader.plan import MicrobatchCost, make_plan
from recipe_utils.data.loader.samples import Sample, SampleError, check_keys, whole_numbers
from recipe_utils.data.text.documents import DocumentLengths, Documents
from recipe_utils.settings.components import component_at
from recipe_utils.settings.settings import ConfigError

CollateFn = Callable[[Sequence[Sample]], dict[str, Any]]
"""As torchtune's ``collate_fn``: samples -> tensors of a batch."""

Collate = Callable[[Sequence[Sample]], Microbatch]
"""Samples -> what one forward and backward consumes: one of the two functions below."""

_TEXT_KEYS = {"tokens", "labels", "mask", "input_pos", "seq_lens"}

_log = get_logger("INFO")


class ModelLimits(NamedTuple):
    """What samples, rows and their costs depend on in a model."""

    vocab_size: int
    """Number of token embeddings."""
    max_seq_len: int
    """Longest sequence that the model takes [tokens]."""
    cost: MicrobatchCost
    other_attention: str | None = None
    """The kind of attention that cannot keep the documents of a row apart; None if it can."""
    num_row_lengths: int | None = None
    """How many lengths packed rows may have, where code is compiled for each; None for any."""
    num_row_lengths_with_shared_prefixes: int | None = None
    """The same for rows with prefix-shared pairs; None for as many."""
    row_multiple: int | None = None
    """What packed rows are padded to a multiple of in any case [slots]; None for no padding."""
    packing_problem: str | None = None
    """Why packed rows cannot be computed here, and what to set instead; None if they can."""
    packing_problem_with_shared_prefixes: str | None = None
    """The same for rows with prefix-shared pairs; None for no problem of their own."""
    limits_length: str = "the model's"
    """Whose ``max_seq_len`` it is, for errors."""
    costs_are_estimated: bool = False
    """Whether ``cost`` was never measured on such a device."""

    def with_shared_prefixes(self) -> "ModelLimits":
        """Returns the limits of rows with prefix-shared pairs."""
        return self._replace(
            num_row_lengths=self.num_row_lengths_with_shared_prefixes or self.num_row_lengths,
            packing_problem=self.packing_problem_with_shared_prefixes or self.packing_problem,
        )

    def longest_row(self, max_tokens: int | None, most_samples: int) -> int:
        """Bound on a row, padding included [slots].

        Args:
            max_tokens: that a row is filled up to.
            most_samples: of a row that no such bound is set for.
        """
        return (max_tokens or 0) + most_samples * self.max_seq_len + (self.row_multiple or 0)


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
        """For DataLoader workers, which prepare samples and ask no teacher."""
        return {**self.__dict__, "_known": None}

    def for_validation(self) -> "TextCollator":
        """The same for the validation loader: ``batch_size_val`` samples per microbatch, no teacher outputs."""
        return self._of_validation()

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


def row_multiple_of_packed(limits: ModelLimits, row_length: int | None) -> int | None:
    """What the lengths of packed rows are to be multiples of [tokens]; None if they may have any.

    Args:
        limits: of the model.
        row_length: the longest row, unless a single sample is longer [tokens]; None if there is no bound.

    Raises:
        recipe_utils.settings.settings.ConfigError: ``microbatching: packed`` cannot be with this model.
    """
    problems = []
    if limits.other_attention is not None:
        problems.append(
            f"microbatching=packed: the model's {limits.other_attention} cannot keep documents of a row "
            "apart; set microbatching=least_padding"
        )
    elif limits.packing_problem is not None:
        problems.append(limits.packing_problem)
    if limits.num_row_lengths is not None and row_length is None:
        problems.append(
            "microbatching=packed: without max_tokens_per_microbatch and tokenizer.max_seq_len rows "
            "have no fixed length, which compile=True and flex attention need; set one of the two"
        )
    if problems:
        raise ConfigError(*problems)
    if limits.num_row_lengths is None or row_length is None:
        return limits.row_multiple
    multiple = limits.row_multiple or 1
    return math.ceil(row_length / limits.num_row_lengths / multiple) * multiple


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


def collate_microbatch(
    samples: Sequence[Sample],
    collate_fn: CollateFn,
    ignore_index: int,
    merge_packed_rows: bool = False,
) -> Microbatch:
    """Makes one microbatch; labels become targets, shifted by one position.

    Args:
        samples: at least one, of one kind: all packed or none.
        collate_fn: returns a dict with ``tokens`` and ``labels``, both [b, s], and further arguments
            of the model's forward. Not called for packed samples, which need no padding.
        ignore_index: the label of positions that are no targets.
        merge_packed_rows: packed samples become one row without their padding, see
            :func:`collate_packed_microbatch`.

    Raises:
        ValueError: ``collate_fn`` returned no labels, or labels of another shape than the tokens.
    """
    document_lengths = None
    if "seq_lens" in samples[0] and merge_packed_rows:
        return collate_packed_microbatch(samples, ignore_index)
    if "seq_lens" in samples[0]:
        document_lengths = [document_lengths_of(sample) for sample in samples]
        inputs: dict[str, Any] = {
            key: torch.stack([torch.as_tensor(sample[key]) for sample in samples])
            for key in ("tokens", "labels", "input_pos")
        }
        inputs["document_lengths"] = Documents(document_lengths)
    else:
        inputs = dict(collate_fn(samples))
    if "labels" not in inputs or inputs["labels"].shape != inputs["tokens"].shape:
        got = {key: tuple(value.shape) for key, value in inputs.items() if hasattr(value, "shape")}
        raise ValueError(f"collate_fn: it must return labels shaped as its tokens, returned {got}")

    labels = _labels_of_next_position(inputs.pop("labels"), document_lengths, ignore_index)
    num_real = sum(num_real_tokens(sample, ignore_index) for sample in samples)
    return _microbatch(inputs, labels, num_real, ignore_index)


def collate_packed_microbatch(
    samples: Sequence[Sample],
    ignore_index: int,
    padding_idx: int = 0,
    row_multiple: int | None = None,
) -> Microbatch:
    """Makes one microbatch of one row, in which sample follows sample.

    Each attends only to itself, its positions start from 0 and its last token predicts nothing. Samples of a
    packed dataset are taken apart into their documents, and their padding is dropped.

    Args:
        samples: at least one, of text.
        ignore_index: the label of positions that are no targets.
        padding_idx: the token to pad with.
        row_multiple: pads the row to a multiple of so many tokens, as one more document. None for no
            padding.

    Raises:
        ValueError: a sample holds images; what else there is besides text is ignored.
    """
    tokens, labels, positions = [], [], []
    lengths: list[int] = []
    for sample in samples:
        if "encoder_input" in sample:
            raise ValueError(
                "microbatching=packed: rows hold text only, a sample has encoder_input, too; set "
                "microbatching=least_padding, and collate_fn for images"
            )
        num_real = num_real_tokens(sample, ignore_index)
        padded = num_real < len(sample["tokens"])
        lengths += document_lengths_of(sample)[: -1 if padded else None]
        tokens.append(torch.as_tensor(sample["tokens"])[:num_real])
        labels.append(torch.as_tensor(sample["labels"])[:num_real])
        # A document that the dataset cut in two goes on counting positions in its second part.
        own_positions = sample.get("input_pos", torch.arange(num_real))
        positions.append(torch.as_tensor(own_positions)[:num_real])
    num_real = sum(lengths)
    if row_multiple is not None and num_real % row_multiple:
        lengths.append(-num_real % row_multiple)
        tokens.append(torch.full((lengths[-1],), padding_idx))
        labels.append(torch.full((lengths[-1],), ignore_index))
        positions.append(torch.zeros(lengths[-1], dtype=torch.long))
    inputs = {
        "tokens": torch.cat(tokens).unsqueeze(0),
        "input_pos": torch.cat(positions).unsqueeze(0),
        "document_lengths": Documents([lengths]),
    }
    shifted = _labels_of_next_position(torch.cat(labels).unsqueeze(0), [lengths], ignore_index)
    return _microbatch(inputs, shifted, num_real, ignore_index)


def collate_empty_microbatch(sample: Sample, collate: Collate, ignore_index: int) -> Microbatch:
    """A microbatch without real tokens, for a rank that has fewer microbatches than the others.

    Every rank must run the same forwards and backwards, or FSDP's collectives hang. So the rank runs
    a sample whose targets are all ignored: a zero loss with a graph through every parameter. Plain
    text is cut to one token, anything else (images, packed rows) keeps its shape.
    """
    if set(sample) <= {"tokens", "labels", "mask"}:
        sample = {"tokens": list(sample["tokens"][:1]), "labels": [ignore_index]}
    else:
        ignored = torch.full_like(torch.as_tensor(sample["labels"]), ignore_index)
        sample = {**sample, "labels": ignored if "seq_lens" in sample else ignored.tolist()}
    return replace(collate([sample]), counts={})


def document_lengths_of(sample: Sample) -> list[int]:
    """Tokens of each document of a sample, one unless it is packed; padding is the last of them."""
    if "seq_lens" not in sample:
        return [len(sample["tokens"])]
    return [length for length in torch.as_tensor(sample["seq_lens"]).tolist() if length]


def num_targets_of(sample: Sample, ignore_index: int) -> int:
    """Tokens of a sample that are predicted: with a label, and not the first of their document."""
    is_target = torch.as_tensor(sample["labels"]) != ignore_index
    lengths = document_lengths_of(sample)
    is_target[list(accumulate(lengths[:-1], initial=0))] = False
    return int(is_target.sum())


def num_real_tokens(sample: Sample, ignore_index: int) -> int:
    """Tokens of a sample that are no padding.

    Only packed samples hold padding: torchtune appends it to a row as one more "document" of a
    single repeated token without targets.
    """
    if "seq_lens" not in sample:
        return len(sample["tokens"])
    last = document_lengths_of(sample)[-1]
    tokens, labels = sample["tokens"][-last:], sample["labels"][-last:]
    is_padding = bool((tokens == tokens[-1]).all() and (labels == ignore_index).all())
    return len(sample["tokens"]) - (last if is_padding else 0)


def _microbatch(
    inputs: dict[str, Any], labels: Tensor, num_real: int, ignore_index: int
) -> Microbatch:
    positions = (labels.flatten() != ignore_index).nonzero().squeeze(1)
    counts = {
        "target_tokens": len(positions),
        "real_tokens": num_real,
        "positions": inputs["tokens"].numel(),
    }
    return Microbatch(inputs, Targets(labels, positions), counts)


def _labels_of_next_position(
    labels: Tensor, document_lengths: DocumentLengths | None, ignore_index: int
) -> Tensor:
    """Shifts labels [b, s] left by one; the last position of a row or document has no target."""
    shifted = labels.roll(-1, dims=1)
    shifted[:, -1] = ignore_index
    for row, lengths in zip(shifted, document_lengths or (), strict=document_lengths is not None):
        # Without this the last token of a document is trained to predict the first token of an
        # unrelated one, whenever that one's prompt is not masked.
        row[torch.tensor(lengths).cumsum(0) - 1] = ignore_index
    return shifted
