"""Pairs of answers as a kind of sample: checked, measured, and made into microbatches, padded or packed.

A sample is a pair, and its two answers are never apart: they are in one microbatch on one rank. Packed, what
both sides begin with (the prompt, and more where answers begin alike) is computed once.

Shapes: p pairs, b rows, s slots (positions) per row, n target tokens of all p pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from omegaconf import DictConfig, ListConfig
from pydantic.dataclasses import dataclass

from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.samples import (
    Sample,
    SkippedSampleError,
    check_keys,
    load_dataset,
    whole_numbers,
)
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.pairs.collate import (
    IGNORE_INDEX,
    SIDES,
    collate_packed_pairs,
    collate_padded_pairs,
    num_shared_tokens,
    packed_row,
    padded_rows,
)
from recipe_utils.data.text.collator import check_sample
from recipe_utils.data.text.limits import ModelLimits, row_multiple_of_packed
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import Problem


@dataclass(frozen=True, config=STRICT)
class PairSettings:
    """How pairs become microbatches, besides what is said of samples of any kind."""

    prefix_sharing: bool | None = None
    """Computes what both sides of a pair begin with once; null is True where ``microbatching: packed``."""

    def shares_prefixes(self, data: DataSettings) -> bool:
        """Whether what both sides begin with is computed once."""
        return data.is_packed and self.prefix_sharing is not False

    def problems_with(self, data: DataSettings) -> Iterator[Problem]:
        """What of the data's keys pairs cannot have."""
        if self.prefix_sharing and not data.is_packed:
            yield Problem(
                "prefix_sharing",
                f"microbatching={data.microbatching} gives each side a row of its own; "
                "set microbatching=packed",
                True,
                depends_on=("microbatching",),
            )
        if data.collate_fn != DataSettings.collate_fn:
            yield Problem(
                "collate_fn",
                "pairs are collated in one way only; leave the key out",
                data.collate_fn,
            )


class CachedLogProbs(Protocol):
    """A cache of a reference's log-probabilities."""

    def find(self, samples: Sequence[Sample], num_rows: Sequence[int], /) -> Any:
        """Returns what the training loop looks them up by; its ``num_missing`` are not in the cache."""


def load_pairs(cfg: DictConfig | ListConfig, tokenizer: Any) -> Any:
    """A preference dataset of its component, or of a list of components one after the other.

    Raises:
        ValueError: its samples are no pairs.
    """
    dataset = load_dataset(cfg, tokenizer)
    try:
        keys = sorted(dataset[0])
    except Exception:  # no dataset, an empty one, or a bad sample, which is named when it is needed
        return dataset
    if "chosen_input_ids" not in keys:
        raise ValueError(
            f"its samples have {', '.join(map(str, keys))} instead of chosen_input_ids, chosen_labels, "
            "rejected_input_ids and rejected_labels; set it to a preference dataset, such as "
            "torchtune.datasets.preference_dataset"
        )
    return dataset


class PairCollator:
    """Pairs of a chosen and a rejected answer, as torchtune's preference datasets return them.

    Args:
        settings: of the data; the plan, and what limits a microbatch. ``batch_size`` counts pairs.
        tokenizer: has ``pad_id`` and, if it truncates samples, ``max_seq_len``.
        limits: of the model.
        pair_settings: of the pairs.
        cache: of a reference's log-probabilities; None without one.

    Raises:
        recipe_utils.settings.problems.ConfigError: ``microbatching: packed`` cannot be with this model.
    """

    counts = (
        "pairs", "missing_pairs", "chosen_tokens", "target_tokens", "real_tokens", "shared_tokens", "positions",
    )  # fmt: skip
    """What a microbatch counts: pairs; of them, those missing in the cache; targets of the chosen answers;
    targets, and tokens, of both; of these, those that are computed once instead of twice; computed positions."""
    fingerprint_keys = (
        "chosen_input_ids",
        "chosen_labels",
        "rejected_input_ids",
        "rejected_labels",
    )

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: Any,
        limits: ModelLimits,
        pair_settings: PairSettings,
        cache: CachedLogProbs | None = None,
    ) -> None:
        self._of_validation = partial(
            PairCollator, settings.of_validation(), tokenizer, limits, pair_settings
        )
        self._limits = limits
        self._cache = cache
        self._is_packed = settings.is_packed
        self._shares_prefixes = pair_settings.shares_prefixes(settings)
        self.layout = "packed" if self._is_packed else "padded"
        """Of rows, as far as a log-probability's last digits depend on it."""
        if self._shares_prefixes:
            self.layout += ", prefixes shared"
        self._pad_id: int = tokenizer.pad_id
        max_seq_len: int | None = getattr(tokenizer, "max_seq_len", None)
        self._max_seq_len = max_seq_len
        self._max_tokens_per_microbatch = max_tokens = settings.max_tokens_per_microbatch
        most_pairs = max(settings.batch_size, settings.batch_size_val or 0)
        self.longest_row = limits.longest_row(max_tokens, 2 * most_pairs)
        """Bound on a row, padding included, in validation, too [slots]."""
        if max_tokens is None and max_seq_len is not None:
            max_tokens = 2 * settings.batch_size * max_seq_len
        cost = settings.cost(limits.cost)
        self._cost_warnings = list(settings.cost_warnings(limits.costs_are_estimated))
        if self._is_packed:
            of_rows = limits.with_shared_prefixes() if self._shares_prefixes else limits
            self._row_multiple = row_multiple_of_packed(of_rows, max_tokens)
        else:
            # A pair is two rows of the longer side's length, and the plan is told of one.
            max_tokens = max(max_tokens // 2, 1) if max_tokens else None
            cost = cost._replace(overhead_slots=cost.overhead_slots / 2)
        self.plan = settings.make_plan(max_tokens, cost)

    def __getstate__(self) -> dict[str, Any]:
        """For DataLoader workers, which prepare samples and read no cache."""
        return {**self.__dict__, "_cache": None, "_of_validation": None}

    def for_validation(self) -> "PairCollator":
        """Returns the validation loader's collator: ``batch_size_val`` pairs per microbatch."""
        return self._of_validation(cache=self._cache)

    def warnings(self) -> Iterator[str]:
        """Whether pairs may be longer than a microbatch, and whether plans rest on guesses."""
        yield from self._cost_warnings
        bound, longest = self._max_tokens_per_microbatch, self._max_seq_len
        if bound is not None and (longest is None or bound < 2 * longest):
            yield (
                f"max_tokens_per_microbatch={bound}: a pair with more tokens (twice "
                f"tokenizer.max_seq_len={longest}) gets a microbatch of its own"
            )

    def prepare(self, sample: Sample, name: str) -> Sample:
        """The pair as arrays, with its name and how many tokens both sides share.

        Raises:
            SampleError: a key is missing, or see :func:`recipe_utils.data.text.collator.check_sample`.
            SkippedSampleError: a side without a target, or sides that are equal: its gradient says nothing of
                which answer is better.
        """
        pair: dict[str, Any] = {"name": name.replace("sample", "pair", 1)}
        for side in SIDES:
            keys = (f"{side}_input_ids", f"{side}_labels")
            check_keys(sample, keys, name)
            tokens, labels = (whole_numbers(sample, key, name) for key in keys)
            check_sample(
                {"tokens": tokens, "labels": labels},
                f"{name}, {side}",
                IGNORE_INDEX,
                self._limits,
            )
            # The first token has none before it that it could be predicted from.
            if (labels[1:] == IGNORE_INDEX).all():
                raise SkippedSampleError(f"{name}: its {side} side has no target")
            pair |= dict(zip(keys, (tokens, labels), strict=True))
        num_shared = num_shared_tokens(pair)
        if num_shared is None:
            raise SkippedSampleError(f"{name}: its sides are equal")
        pair["num_shared"] = num_shared if self._shares_prefixes else 0
        return pair

    def length(self, sample: Sample) -> int:
        """Slots that a pair takes in a row; padded, those of its longer side."""
        lengths = [len(sample[f"{side}_input_ids"]) for side in SIDES]
        return sum(lengths) - sample["num_shared"] if self._is_packed else max(lengths)

    def collate(self, samples: Sequence[Sample]) -> Microbatch:
        """Makes a microbatch of pairs, at least one; with a cache, with what outputs are looked up by."""
        microbatch = self._collate(samples)
        if self._cache is None:
            return microbatch
        found = self._cache.find(samples, [1] * len(samples))
        counts = {**microbatch.counts, "missing_pairs": found.num_missing}
        return replace(microbatch.with_teacher(found), counts=counts)

    def dummy(self, sample: Sample) -> Microbatch:
        """Makes a microbatch of no pair and one token, whose log-probabilities [0] have a graph."""
        token = torch.tensor([[sample["chosen_input_ids"][0]], [IGNORE_INDEX], [0]])
        if self._is_packed:
            microbatch = packed_row([token], [1], [], self._pad_id, self._row_multiple)
        else:
            microbatch = padded_rows(token[:1], token[1:2], [])
        return replace(microbatch, counts={})

    def _collate(self, samples: Sequence[Sample]) -> Microbatch:
        if self._is_packed:
            return collate_packed_pairs(samples, self._pad_id, self._row_multiple)
        return collate_padded_pairs(samples, self._pad_id)
