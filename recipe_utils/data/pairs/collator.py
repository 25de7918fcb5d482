"""Collator of preference pairs, padded or packed.

Both answers of a pair are in one microbatch. If packed, their common prefix (the prompt, and more
if the answers start alike) is computed once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

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
from recipe_utils.data.plan.plan import WHOLE, Part
from recipe_utils.data.text.collator import check_sample
from recipe_utils.data.text.limits import ModelLimits, row_multiple_of_packed
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import Problem


@dataclass(frozen=True, config=STRICT)
class PairSettings(DataSettings):
    """Settings of pairs, besides those of all samples."""

    prefix_sharing: bool | None = None
    """Computes the common prefix of a pair's sides once; null is True with ``microbatching: packed``."""

    def shares_prefixes(self, data: DataSettings) -> bool:
        """Returns True if the common prefix is computed once."""
        return data.is_packed and self.prefix_sharing is not False

    def problems(self) -> Iterator[Problem]:
        """Yields values of the data keys that pairs do not support."""
        if self.prefix_sharing and not self.is_packed:
            text = (
                f"microbatching={self.microbatching} gives each side a row of its own; set "
                "microbatching=packed"
            )
            yield Problem("prefix_sharing", text, True)
        if self.collate_fn != DataSettings.collate_fn:
            text = "pairs are collated in one way only; remove the key"
            yield Problem("collate_fn", text, self.collate_fn)


def load_pairs(cfg: DictConfig | ListConfig, tokenizer: Any, **options: Any) -> Any:
    """Calls :func:`.load_dataset`; raises ValueError if the first sample is not a pair."""
    dataset = load_dataset(cfg, tokenizer, **options)
    try:
        keys = sorted(dataset[0])
    except Exception:  # not a dataset, empty, or a bad sample: reported when it is loaded
        return dataset
    if "chosen_input_ids" not in keys:
        raise ValueError(
            f"its samples have {', '.join(map(str, keys))} instead of chosen_input_ids, chosen_labels, "
            "rejected_input_ids and rejected_labels; set it to a preference dataset, such as "
            "torchtune.datasets.preference_dataset"
        )
    return dataset


class PairCollator:
    """Collator of pairs as torchtune's preference datasets return them.

    ``batch_size`` counts pairs. ``cache`` is the reference's
    :class:`recipe_utils.model.frozen.outputs.FrozenOutputs`. Raises ConfigError if the model does
    not support ``microbatching: packed``.
    """

    counts: Sequence[str] = (
        "pairs", "chosen_tokens", "target_tokens", "real_tokens", "shared_tokens", "positions",
    )  # fmt: skip
    """Pairs; targets of chosen answers; targets and tokens of both answers;
    tokens computed once instead of twice; computed positions; also pairs in rows of several ranks."""
    fingerprint_keys = tuple(f"{side}_{key}" for side in SIDES for key in ("input_ids", "labels"))

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: Any,
        limits: ModelLimits,
        pair_settings: PairSettings,
        cache: Any = None,
    ) -> None:
        self._make_for_validation = partial(
            PairCollator, settings.of_validation(), tokenizer, limits, pair_settings
        )
        self._limits, self._cache = limits, cache
        if settings.max_ranks_per_row > 1:
            self.counts = (*self.counts, "spanning_samples")
        self._max_ranks_per_row = settings.max_ranks_per_row
        self._is_packed = settings.is_packed
        self._shares_prefixes = pair_settings.shares_prefixes(settings)
        self.layout = "packed" if self._is_packed else "padded"
        """Layout of rows; the rounding of log-probabilities depends on it."""
        if self._shares_prefixes:
            self.layout += ", prefixes shared"
        self._pad_id: int = tokenizer.pad_id
        self._max_seq_len = max_seq_len = getattr(tokenizer, "max_seq_len", None)
        self._max_tokens_per_microbatch = max_tokens = settings.max_tokens_per_microbatch
        most_pairs = max(settings.batch_size, settings.batch_size_val or 0)
        self.longest_row = limits.longest_row(max_tokens, 2 * most_pairs)
        """Bound on a row in training and validation, padding included [positions]."""
        if max_tokens is None and max_seq_len is not None:
            max_tokens = 2 * settings.batch_size * max_seq_len
        cost = settings.cost(limits.cost)
        self._cost_warnings = list(settings.cost_warnings(limits.costs_are_estimated))
        if self._is_packed:
            of_rows = limits.with_shared_prefixes() if self._shares_prefixes else limits
            self._row_multiple = row_multiple_of_packed(
                of_rows, max_tokens, settings.max_ranks_per_row
            )
        else:
            # A pair is two rows of the longer side's length; the plan counts it as one.
            max_tokens = max(max_tokens // 2, 1) if max_tokens else None
            cost = cost._replace(overhead_slots=cost.overhead_slots / 2)
        self.plan = settings.make_plan(max_tokens, cost)

    def __getstate__(self) -> dict[str, Any]:
        """Omits the cache, which DataLoader workers do not use."""
        return {**self.__dict__, "_cache": None, "_make_for_validation": None}

    def for_validation(self) -> "PairCollator":
        """Returns the validation loader's collator: ``batch_size_val`` pairs per microbatch."""
        return self._make_for_validation(cache=self._cache)

    def warnings(self) -> Iterator[str]:
        """Yields warnings about estimated costs and about pairs longer than a microbatch."""
        yield from self._cost_warnings
        bound, longest = self._max_tokens_per_microbatch, self._max_seq_len
        most = self._max_ranks_per_row
        if bound is not None and (longest is None or most * bound < 2 * longest):
            on_most, more = "", "more tokens"
            if most > 1:
                on_most, more = f", max_ranks_per_row={most}", f"more than {most * bound} tokens"
            yield (
                f"max_tokens_per_microbatch={bound}{on_most}: a pair with {more} (twice "
                f"tokenizer.max_seq_len={longest}) gets a microbatch of its own"
            )

    def remarks(self, sample: Sample) -> Iterator[str]:
        """Yields whether a pair is truncated, or is not two answers to one prompt."""
        lengths = {side: len(sample[f"{side}_input_ids"]) for side in SIDES}
        if self._max_seq_len in lengths.values():
            yield f"a side of tokenizer.max_seq_len={self._max_seq_len} tokens, probably truncated"
        prompts = []
        for side in SIDES:
            labels = sample[f"{side}_labels"]
            first_target = int((labels != IGNORE_INDEX).argmax())
            prompts.append(sample[f"{side}_input_ids"][:first_target].tolist())
        if prompts[0] != prompts[1]:
            yield "its two sides have different prompts"

    def prepare(self, sample: Sample, name: str) -> Sample:
        """Returns the pair as arrays, with its name and number of shared tokens.

        Raises SampleError (see :func:`recipe_utils.data.text.collator.check_sample`);
        SkippedSampleError if a side has no target, or the sides are equal.
        """
        pair: dict[str, Any] = {"name": name.replace("sample", "pair", 1)}
        for side in SIDES:
            keys = (f"{side}_input_ids", f"{side}_labels")
            check_keys(sample, keys, name)
            tokens, labels = (whole_numbers(sample, key, name) for key in keys)
            side_of_pair = {"tokens": tokens, "labels": labels}
            check_sample(side_of_pair, f"{name}, {side}", IGNORE_INDEX, self._limits)
            # The first token is never predicted.
            if (labels[1:] == IGNORE_INDEX).all():
                raise SkippedSampleError(f"{name}: its {side} side has no target")
            pair |= dict(zip(keys, (tokens, labels), strict=True))
        num_shared = num_shared_tokens(pair)
        if num_shared is None:
            raise SkippedSampleError(f"{name}: its sides are equal")
        pair["num_shared"] = num_shared if self._shares_prefixes else 0
        return pair

    def length(self, sample: Sample) -> int:
        """Returns the positions of a pair in a row; if padded, those of its longer side."""
        lengths = [len(sample[f"{side}_input_ids"]) for side in SIDES]
        return sum(lengths) - sample["num_shared"] if self._is_packed else max(lengths)

    def collate(self, samples: Sequence[Sample], part: Part = WHOLE) -> Microbatch:
        """Makes a microbatch of at least one pair, or a part of it, with log-probabilities of a cache."""
        if self._is_packed:
            microbatch = collate_packed_pairs(samples, self._pad_id, self._row_multiple, part)
        else:
            microbatch = collate_padded_pairs(samples, self._pad_id)
        if self._cache is None:
            return microbatch
        return microbatch.with_teacher(self._cache.find(samples, [1] * len(samples)))

    def dummy(self, sample: Sample) -> Microbatch:
        """Makes a microbatch of one token and no pair; its log-probabilities [0] have a graph."""
        token = torch.tensor([[sample["chosen_input_ids"][0]], [IGNORE_INDEX], [0]])
        if self._is_packed:
            microbatch = packed_row([token], [1], [], self._pad_id, self._row_multiple)
        else:
            microbatch = padded_rows(token[:1], token[1:2], [])
        return replace(microbatch, counts={})
