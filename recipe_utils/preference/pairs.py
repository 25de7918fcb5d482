"""Preference pairs as samples of two sequences, padded or packed.

Both answers of a pair are in one microbatch. If packed, their common prefix is computed once.

Example: the sides ``u v w A B`` and ``u v w C``, targets in capitals, begin with the same 3 tokens. The last of them
predicts A or C, so they share 2. The row ``u v  w A B  w C`` is the tree (2, 3, 2): 7 positions instead of 9. Its
segments have 0, 2 and 1 targets. Shapes: p pairs.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
from pydantic.dataclasses import dataclass

from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.text.collator import RowCollator
from recipe_utils.text.documents import Document, tree
from recipe_utils.text.limits import ModelLimits, RowBounds
from recipe_utils.text.reader import TextReader, check_all_taken, check_sample, end_ids_of
from recipe_utils.text.samples import FIRST, TextSample
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.order import StepIndex
from recipe_utils.update_steps.samples import Sample, SkippedSampleError, check_has, whole_numbers
from recipe_utils.update_steps.settings import DataSettings

SIDES = ("chosen", "rejected")


@dataclass(frozen=True, config=STRICT)
class PairSettings:
    """Settings of pairs, besides those of all samples."""

    prefix_sharing: bool | None = None
    """Computes the common prefix of a pair's sides once; null is True with ``microbatching: packed``,
    unless the model computes no trees."""

    unused: ClassVar = {
        "collate_fn": "pairs are collated in one way only",
        "max_ranks_per_row": "one rank computes both answers of a pair",
    }

    def problems_of_pairs(self, data: DataSettings) -> Iterator[Problem]:
        """Yields values of the data keys that pairs do not support."""
        if self.prefix_sharing and not data.is_packed:
            text = f"microbatching={data.microbatching} gives each side a row of its own; set microbatching=packed"
            yield Problem("prefix_sharing", text, True)


def check_is_pair(sample: Any) -> None:
    """Raises ValueError if the first sample of a dataset is not a pair."""
    if isinstance(sample, Mapping) and "chosen_input_ids" not in sample:
        raise ValueError(
            f"its samples have {', '.join(sorted(map(str, sample)))} instead of chosen_input_ids, chosen_labels, "
            "rejected_input_ids and rejected_labels; set it to recipe_utils.preference.pair_dataset, or to a "
            "preference dataset of torchtune"
        )


def num_shared_tokens(pair: Mapping[str, Any]) -> int | None:
    """Returns the number of tokens that both sides of a pair can share; None if they are equal.

    Longest common prefix of tokens and labels, less one, because the next token of the last differs.
    """
    chosen, rejected = (np.stack([pair[f"{s}_input_ids"], pair[f"{s}_labels"]]) for s in SIDES)
    shorter = min(chosen.shape[1], rejected.shape[1])
    differ = (chosen[:, :shorter] != rejected[:, :shorter]).any(axis=0)
    if differ.any():
        return max(int(differ.argmax()) - 1, 0)
    return None if chosen.shape == rejected.shape else shorter - 1


def mask_shared_turns(pair: Mapping[str, Any]) -> None:
    """Masks the labels of earlier turns that both sides share: they are a part of the prompt.

    Example: of ``u A v B`` and ``u A v C`` (targets in capitals) A is masked. Of ``u AB`` and ``u AC`` nothing is,
    because a turn that only begins alike is an answer. Nor is the last run of targets of a side.
    """
    tokens, labels = ([pair[f"{side}_{key}"] for side in SIDES] for key in ("input_ids", "labels"))
    shorter = min(map(len, tokens))
    differ = tokens[0][:shorter] != tokens[1][:shorter]
    end = int(differ.argmax()) if differ.any() else shorter
    # masks[i + 1] is that of position i; runs of targets start where it ends.
    masks = [np.append(True, side == IGNORE_INDEX) for side in labels]
    starts = [np.flatnonzero(mask[:-1] & ~mask[1:]) for mask in masks]
    end = min(end, *(runs[-1] for runs in starts))
    # A run that goes on beyond the common tokens is an answer from its start.
    while inside := [i for i, mask in enumerate(masks) if not mask[end] and not mask[end + 1]]:
        end = min(starts[i][starts[i] < end][-1] for i in inside)
    for side in labels:
        side[:end] = IGNORE_INDEX


@dataclasses.dataclass(frozen=True)
class PairReader(TextReader):
    """Checks of pairs as torchtune's preference datasets return them; ``shares``: their common prefix exists once.

    A pair has two sequences, chosen before rejected, with the values ``num_targets`` [shared, further] (no shared
    ones for rejected, whose targets are ``num_targets`` [0] of chosen and its own) and ``fingerprint`` [16].
    """

    shares: bool = False

    @property
    def counts(self) -> Sequence[str]:
        """Names of counts: pairs; targets of chosen answers; targets, tokens and shared ones of both; positions."""
        return ("pairs", "chosen_tokens", "target_tokens", "real_tokens", "shared_tokens", "positions")

    def remarks(self, sample: TextSample) -> Iterator[str]:
        """Yields a text if a pair is probably truncated, or its sides are no answers to one prompt."""
        tokens, labels = _sides(sample)
        if (most := self.bounds.max_seq_len) in [len(side) for side in tokens]:
            yield f"a side of tokenizer.max_seq_len={most} tokens, probably truncated"
        prompts = [side[: int((mask != IGNORE_INDEX).argmax())] for side, mask in zip(tokens, labels, strict=True)]
        if not np.array_equal(prompts[0], prompts[1]):
            yield "its two sides differ before their first target"

    def prepare(self, sample: Sample, name: str, at: StepIndex = FIRST) -> TextSample:
        """Returns the pair as a tree of its common prefix and both rests, or as two documents; masks shared turns.

        Raises SampleError (see :func:`recipe_utils.text.reader.check_sample`);
        SkippedSampleError if a side has no target, or the sides are equal.
        """
        # Each side is checked as a sample of its own.
        pair: dict[str, np.ndarray] = {}
        for side in SIDES:
            keys = (f"{side}_input_ids", f"{side}_labels")
            check_has(sample, keys, name)
            tokens, labels = (whole_numbers(sample, key, name) for key in keys)
            check_sample({"tokens": tokens, "labels": labels}, f"{name}, {side}", IGNORE_INDEX, self.bounds.limits)
            check_all_taken({key: sample[key] for key in sample if not key.startswith(SIDES)}, tokens, labels, name)
            # The first token is never predicted.
            if (labels[1:] == IGNORE_INDEX).all():
                raise SkippedSampleError(f"{name}: its {side} side has no target")
            pair |= dict(zip(keys, (tokens, labels), strict=True))
        mask_shared_turns(pair)
        num_shared = num_shared_tokens(pair)
        if num_shared is None:
            raise SkippedSampleError(f"{name}: its sides are equal")
        num_shared *= self.shares
        # By its fingerprint, the reference's log-probabilities of a pair are found again.
        digest = blake2b(digest_size=16)
        for key in (f"{side}_{key}" for side in SIDES for key in ("input_ids", "labels")):
            digest.update(len(pair[key]).to_bytes(8, "little") + pair[key].tobytes())
        # Neither rest attends to the other; positions of both continue those of the prefix.
        (tokens, others), (labels, other_labels) = (
            [pair[f"{s}_{key}"] for s in SIDES] for key in ("input_ids", "labels")
        )
        length, num_rest = len(tokens), len(others) - num_shared
        documents: list[Document] = [length, num_rest]
        sequences = positions = None
        if num_shared:
            documents = [tree(num_shared, length - num_shared, num_rest)]
            positions = np.append(np.arange(length), np.arange(num_shared, len(others)))
            owners = np.repeat([0, 1], [length, num_rest])
            sequences = owners, np.array([length - 1, length + num_rest - 1])
        are_targets = [labels[1:] != IGNORE_INDEX, other_labels[1:] != IGNORE_INDEX]
        num_targets = [np.split(each, [num_shared]) for each in are_targets]
        rest = other_labels[num_shared:].copy()
        rest[: num_shared > 0] = IGNORE_INDEX  # it is the target of the prefix, not of the chosen side's last token
        return TextSample(
            name,
            at,
            np.append(tokens, others[num_shared:]),
            np.append(labels, rest),
            documents,
            values={
                "num_targets": np.array([[each.sum() for each in num_targets[0]], [0, num_targets[1][1].sum()]]),
                "fingerprint": np.frombuffer(digest.digest() * 2, dtype=np.uint8).reshape(2, 16),
            },
            sequences=sequences,
            positions=positions,
            num_shared=[num_shared],
        )

    def content(self, sample: TextSample) -> tuple[Sequence[np.ndarray], Mapping[str, Any]]:
        """Returns tokens and labels of both sides."""
        tokens, labels = _sides(sample)
        return (tokens[0], labels[0], tokens[1], labels[1]), {}

    def count(self, counts: Mapping[str, float], values: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        """Returns the counts of pairs."""
        shared, chosen, _, rejected = values["num_targets"].reshape(-1, 4).sum(0).tolist()
        return {
            "pairs": len(values["num_targets"]) // 2,
            "chosen_tokens": shared + chosen,
            "target_tokens": 2 * shared + chosen + rejected,
            **{name: counts[name] for name in ("real_tokens", "shared_tokens", "positions")},
        }


def _sides(sample: TextSample) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns tokens and labels of both sides of a pair."""
    (num_shared,), (last, end) = sample.num_shared, sample.owners_and_ends()[1]
    chosen, rest = slice(last + 1), slice(last + 1, end + 1)
    tokens = [sample.tokens[chosen], np.append(sample.tokens[:num_shared], sample.tokens[rest])]
    labels = [sample.labels[chosen], np.append(sample.labels[:num_shared], sample.labels[rest])]
    if num_shared:  # equal on both sides
        labels[1][num_shared] = labels[0][num_shared]
    return tokens, labels


def pair_collator(
    settings: DataSettings, tokenizer: Any, limits: ModelLimits, prefix_sharing: bool | None = None
) -> RowCollator:
    """Returns the collator of pairs; ``batch_size`` counts pairs.

    Raises ConfigError if the model does not support ``microbatching: packed``.
    """
    if settings.is_packed and prefix_sharing is None:
        with suppress(ConfigError):
            return pair_collator(settings, tokenizer, limits, prefix_sharing=True)
    shares = bool(settings.is_packed and prefix_sharing)
    bounds = RowBounds(settings, limits, getattr(tokenizer, "max_seq_len", None), num_rows=2)
    reader = PairReader(IGNORE_INDEX, bounds, end_ids=end_ids_of(tokenizer), shares=shares)
    trees = ("prefix_sharing=True", "set prefix_sharing=False") if shares else None
    return RowCollator(settings, reader, tokenizer.pad_id, trees)


def layout_of(settings: DataSettings, prefix_sharing: bool | None) -> str:
    """Returns the layout of rows of pairs; the rounding of log-probabilities depends on it."""
    shares = ", prefixes shared" if prefix_sharing is not False else ""
    return f"packed{shares}" if settings.is_packed else "padded"
