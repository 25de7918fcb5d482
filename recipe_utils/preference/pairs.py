"""Preference pairs as groups of two answers to one prompt, padded or packed.

Both answers of a pair are in one microbatch. If packed, what precedes them is computed once.

Example: the sides ``u v w A B`` and ``u v w C``, targets in capitals, begin with the same 3 tokens. The last of them
predicts A or C, so the tree (2, 3, 2) has it twice: 7 positions instead of 9, see :mod:`recipe_utils.text.trees`. Of
``u v w A B`` and ``u v w A C`` A is predicted once, in the tree (3, 2, 2), and counts for both.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from pydantic.dataclasses import dataclass

from recipe_utils.data.collators import text_collator
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.text.collator import RowCollator
from recipe_utils.text.images.sample import ImageInputs
from recipe_utils.text.limits import ModelLimits
from recipe_utils.text.reader import fingerprint_of
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.objective import Declaration
from recipe_utils.update_steps.samples import Sample, SkippedSampleError, check_has, whole_numbers
from recipe_utils.update_steps.settings import DataSettings

SIDES = ("chosen", "rejected")
_OF_PAIRS = Declaration(
    of_samples=("pairs", "chosen_tokens", "common_tokens", "fingerprint"),
    divisor="pairs",
    totals=("pairs", "chosen_tokens"),
    couples_sequences=True,
)
"""Values of a pair's answers, see :func:`pair_as_group`."""


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


def mask_shared_turns(tokens: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> None:
    """Masks the labels of earlier turns that both sides share: they are a part of the prompt.

    Example: of ``u A v B`` and ``u A v C`` (targets in capitals) A is masked. Of ``u AB`` and ``u AC`` nothing is,
    because a turn that only begins alike is an answer. Nor is the last run of targets of a side.
    """
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


def pair_as_group(pair: Sample, name: str, shares: bool = False) -> Sample:
    """Returns a pair, as torchtune's preference datasets return it, as a group of two ``sequences``, its sides.

    Turns that both share are masked. Values of both are ``pairs``, 1 for chosen, the number of ``chosen_tokens``, and a
    ``fingerprint`` [2]. If the pair ``shares`` its beginning, the targets there are those of chosen alone, their number is
    its value ``common_tokens``, and the loss counts them for both.

    Raises:
        SampleError: a key is missing, or contains no token ids. All else is left to the reader.
        SkippedSampleError: a side has no target, or the sides are equal.
    """
    given = [(f"{side}_input_ids", f"{side}_labels") for side in SIDES]
    for each in given:
        check_has(pair, each, name)
    tokens, labels = ([whole_numbers(pair, key, name).copy() for key in each] for each in zip(*given, strict=True))
    beside = {key: value for key, value in pair.items() if not str(key).startswith(SIDES)}
    if all(len(ids) == len(of_ids) for ids, of_ids in zip(tokens, labels, strict=True)):
        for side, of_side in zip(SIDES, labels, strict=True):
            if len(of_side) and (of_side[1:] == IGNORE_INDEX).all():  # the first token is never predicted
                raise SkippedSampleError(f"{name}: its {side} side has no target")
        mask_shared_turns(tokens, labels)
        if np.array_equal(tokens[0], tokens[1]) and np.array_equal(labels[0], labels[1]):
            raise SkippedSampleError(f"{name}: its sides are equal")
    images: list[ImageInputs | None] = [pair.get(f"{side}_image_inputs") for side in SIDES]
    of_sides = [ids if beside is None else beside.keys_of(ids) for ids, beside in zip(tokens, images, strict=True)]
    fingerprints = [fingerprint_of(*side) for side in zip(of_sides, labels, strict=True)]
    num_chosen, num_common = int((labels[0][1:] != IGNORE_INDEX).sum()), 0
    if shares:
        end = num_common_tokens(tokens, labels)
        num_common = int((labels[1][1:end] != IGNORE_INDEX).sum())
        labels[1][1:end] = IGNORE_INDEX
    numbers = {"pairs": (1, 0), "chosen_tokens": (num_chosen, 0), "common_tokens": (num_common, 0)}
    beside_sides = zip(tokens, labels, images, fingerprints, *numbers.values(), strict=True)
    keys = ("tokens", "labels", "image_inputs", "fingerprint", *numbers)
    sides = ({**beside, **dict(zip(keys, each, strict=True))} for each in beside_sides)
    return {"sequences": dict(zip(SIDES, sides, strict=True))}


def num_common_tokens(tokens: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> int:
    """Returns the number of tokens with which both sides begin, with equal labels."""
    shorter = min(map(len, [*tokens, *labels]))
    differ = (tokens[0][:shorter] != tokens[1][:shorter]) | (labels[0][:shorter] != labels[1][:shorter])
    return int(differ.argmax()) if differ.any() else shorter


def pair_collator(
    settings: DataSettings, tokenizer: Any, limits: ModelLimits, prefix_sharing: bool | None = None
) -> RowCollator:
    """Returns the collator of pairs; ``batch_size`` counts pairs.

    A loss finds the two sequences of each pair side by side. For values of answers see :func:`pair_as_group`.

    Raises ConfigError if the model does not support ``microbatching: packed``.
    """
    if settings.is_packed and prefix_sharing is None:
        with suppress(ConfigError):
            return pair_collator(settings, tokenizer, limits, prefix_sharing=True)
    shares = bool(settings.is_packed and prefix_sharing)
    collator = text_collator(
        *(settings, tokenizer, IGNORE_INDEX, limits, True, _OF_PAIRS, shares),
        trees=("prefix_sharing=True", "set prefix_sharing=False") if shares else None,
    )
    changes = [partial(pair_as_group, shares=shares)]
    bounds = collator.reader.bounds._replace(num_rows=2)
    return replace(collator, reader=replace(collator.reader, bounds=bounds, changes=changes, shares=shares))
