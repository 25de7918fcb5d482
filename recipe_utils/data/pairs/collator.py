"""Pairs of answers as a kind of sample: checked, measured, and made into microbatches, padded or packed.

A sample is a pair, and its two answers are never apart: they are in one microbatch on one rank. Packed, what
both sides begin with (the prompt, and more where answers begin alike) is computed once.

Shapes: p pairs, b rows, s slots (positions) per row, n target tokens of all p pairs.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig
from pydantic.dataclasses import dataclass
from torch import Tensor

from recipe_utils.data.loader.microbatch import Microbatch, Pairs, Targets
from recipe_utils.data.loader.samples import (
    Sample,
    SkippedSampleError,
    check_keys,
    load_dataset,
    whole_numbers,
)
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.text.collator import check_sample
from recipe_utils.data.text.documents import Documents
from recipe_utils.data.text.limits import ModelLimits, row_multiple_of_packed
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import Problem

IGNORE_INDEX = -100
"""The label of positions that are no targets, in torchtune's preference datasets."""

_SIDES = ("chosen", "rejected")


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


class KnownLogProbs(Protocol):
    """What is known of a reference's log-probabilities."""

    def key_of(self, pair: Mapping[str, Any], /) -> bytes:
        """What they are known by."""

    def find(self, keys: Sequence[bytes], /) -> Tensor:
        """Those of each chosen and each rejected answer, [2, p]; NaN where they are not known."""


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
        known: log-probabilities of a reference that need not be computed any more; None if all must be.

    Raises:
        recipe_utils.settings.problems.ConfigError: ``microbatching: packed`` cannot be with this model.
    """

    counts = (
        "pairs", "unknown_pairs", "chosen_tokens", "target_tokens", "real_tokens", "shared_tokens", "positions",
    )  # fmt: skip
    """What a microbatch counts: pairs; of them, those whose reference must be computed; targets of the
    chosen answers; targets, and tokens, of both; of these, those that are computed once instead of twice;
    positions that are computed."""
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
        known: KnownLogProbs | None = None,
    ) -> None:
        self._of_validation = partial(
            PairCollator, settings.of_validation(), tokenizer, limits, pair_settings, known
        )
        self._limits = limits
        self._known = known
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
        # DataLoader workers only prepare samples.
        return {**self.__dict__, "_known": None, "_of_validation": None}

    def for_validation(self) -> "PairCollator":
        """The same for the validation loader: ``batch_size_val`` pairs per microbatch."""
        return self._of_validation()

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
        for side in _SIDES:
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
        lengths = [len(sample[f"{side}_input_ids"]) for side in _SIDES]
        return sum(lengths) - sample["num_shared"] if self._is_packed else max(lengths)

    def collate(self, samples: Sequence[Sample]) -> Microbatch:
        """One microbatch of pairs, at least one; with what is known of their reference's log-probabilities."""
        if self._known is None:
            return self._collate(samples)
        samples = [{**sample, "key": self._known.key_of(sample)} for sample in samples]
        microbatch = self._collate(samples)
        known = self._known.find([sample["key"] for sample in samples])
        unknown = [
            s for s, is_nan in zip(samples, known[0].isnan().tolist(), strict=True) if is_nan
        ]
        if len(unknown) == len(samples):
            return microbatch
        targets = microbatch.targets._replace(teacher=known)
        if unknown:
            assert targets.pairs is not None
            of_unknown = self._collate(unknown)
            targets = targets._replace(pairs=targets.pairs._replace(unknown=of_unknown))
        return replace(
            microbatch, targets=targets, counts={**microbatch.counts, "unknown_pairs": len(unknown)}
        )

    def dummy(self, sample: Sample) -> Microbatch:
        """A microbatch of no pair and one token, whose log-probabilities [0] have a graph."""
        token = torch.tensor([[sample["chosen_input_ids"][0]], [IGNORE_INDEX], [0]])
        if self._is_packed:
            microbatch = _packed_row([token], [1], [], self._pad_id, self._row_multiple)
        else:
            microbatch = _padded_rows(token[:1], token[1:2], [])
        return replace(microbatch.with_teacher(torch.zeros(2, 0, dtype=torch.float64)), counts={})

    def _collate(self, samples: Sequence[Sample]) -> Microbatch:
        if self._is_packed:
            return collate_packed_pairs(samples, self._pad_id, self._row_multiple)
        return collate_padded_pairs(samples, self._pad_id)


def num_shared_tokens(pair: Mapping[str, Any]) -> int | None:
    """Tokens that both sides of a pair may share: the longest common prefix, of tokens and labels, less one.

    The last common token has another next token on each side, so it is in both. None of equal sides.

    Args:
        pair: arrays by torchtune's keys.
    """
    chosen, rejected = (np.stack([pair[f"{s}_input_ids"], pair[f"{s}_labels"]]) for s in _SIDES)
    shorter = min(chosen.shape[1], rejected.shape[1])
    differ = (chosen[:, :shorter] != rejected[:, :shorter]).any(axis=0)
    if not differ.any():
        if chosen.shape == rejected.shape:
            return None
        return shorter - 1
    return max(int(differ.argmax()) - 1, 0)


def digest_of(pair: Mapping[str, Any], context: bytes) -> bytes:
    """16 bytes that tell a pair's tokens and labels, and what its log-probabilities depend on, from others."""
    digest = hashlib.blake2b(context, digest_size=16)
    for side in _SIDES:
        tokens, labels = pair[f"{side}_input_ids"], pair[f"{side}_labels"]
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(tokens.tobytes())
        digest.update(labels.tobytes())
    return digest.digest()


def collate_padded_pairs(samples: Sequence[Sample], padding_idx: int) -> Microbatch:
    """Makes a microbatch of two rows per pair, chosen over rejected, padded to the longest of all.

    Args:
        samples: at least one, of :meth:`PairCollator.prepare`.
        padding_idx: the token to pad with.
    """
    longest = max(len(sample[f"{side}_input_ids"]) for sample in samples for side in _SIDES)
    tokens = torch.full((2 * len(samples), longest), padding_idx)
    labels = torch.full((2 * len(samples), longest), IGNORE_INDEX)
    for index, sample in enumerate(samples):
        for row, side in enumerate(_SIDES, start=2 * index):
            ids = sample[f"{side}_input_ids"]
            tokens[row, : len(ids)] = torch.from_numpy(ids)
            labels[row, : len(ids) - 1] = torch.from_numpy(sample[f"{side}_labels"][1:])
    return _padded_rows(tokens, labels, samples)


def _padded_rows(tokens: Tensor, labels: Tensor, samples: Sequence[Sample]) -> Microbatch:
    of_sides = (labels != IGNORE_INDEX).sum(1)[: 2 * len(samples)].view(-1, 2)
    of_pairs = torch.cat([torch.zeros(len(samples), 1, dtype=torch.long), of_sides], dim=1)
    return _microbatch({"tokens": tokens}, labels, samples, of_pairs)


def collate_packed_pairs(
    samples: Sequence[Sample], padding_idx: int = 0, row_multiple: int | None = None
) -> Microbatch:
    """Makes a microbatch of one row, in which pair follows pair: what both share, chosen's rest, rejected's rest.

    Neither rest sees the other; positions of both go on from the shared part's. Each slot has one label, that
    of its next token.

    Args:
        samples: at least one, of :meth:`PairCollator.prepare`.
        padding_idx: the token to pad with.
        row_multiple: pads the row to a multiple of so many tokens, as one more document. None for no
            padding.
    """
    segments: list[Tensor] = []
    lengths: list[Any] = []
    for sample in samples:
        chosen, rejected = (_slots_of(sample, side) for side in _SIDES)
        shared, chosen = chosen.tensor_split([sample["num_shared"]], dim=1)
        rejected = rejected[:, sample["num_shared"] :]
        segments += [shared, chosen, rejected]
        of_parts = tuple(part.size(1) for part in (shared, chosen, rejected))
        lengths += [of_parts] if of_parts[0] else of_parts[1:]
    return _packed_row(segments, lengths, samples, padding_idx, row_multiple)


def _slots_of(sample: Sample, side: str) -> Tensor:
    """Tokens, labels of the next ones and positions of one side alone, [3, s]."""
    tokens = torch.from_numpy(sample[f"{side}_input_ids"])
    labels = torch.from_numpy(sample[f"{side}_labels"]).roll(-1)
    labels[-1] = IGNORE_INDEX
    return torch.stack([tokens, labels, torch.arange(len(tokens))])


def _packed_row(
    segments: Sequence[Tensor],
    lengths: Sequence[Any],
    samples: Sequence[Sample],
    padding_idx: int,
    row_multiple: int | None,
) -> Microbatch:
    """A row of segments [3, .], three for each pair, which are documents of the given lengths."""
    of_segments = [int((segment[1] != IGNORE_INDEX).sum()) for segment in segments]
    of_pairs = torch.tensor(of_segments[: 3 * len(samples)], dtype=torch.long).view(-1, 3)
    num_real = sum(segment.size(1) for segment in segments)
    if row_multiple is not None and num_real % row_multiple:
        padding = torch.tensor([[padding_idx], [IGNORE_INDEX], [0]])
        segments = [*segments, padding.expand(3, -num_real % row_multiple)]
        lengths = [*lengths, -num_real % row_multiple]
    tokens, labels, positions = torch.cat(list(segments), dim=1).unsqueeze(1)
    inputs = {
        "tokens": tokens,
        "input_pos": positions,
        "document_lengths": Documents([list(lengths)]),
    }
    return _microbatch(inputs, labels, samples, of_pairs)


def _microbatch(
    inputs: dict[str, Any], labels: Tensor, samples: Sequence[Sample], of_pairs: Tensor
) -> Microbatch:
    """A microbatch of labels [b, s] for next positions; targets of its segments [p, 3]."""
    shared, chosen, rejected = of_pairs.sum(0).tolist()
    counts = {
        "pairs": len(samples),
        "unknown_pairs": len(samples),
        "chosen_tokens": shared + chosen,
        "target_tokens": 2 * shared + chosen + rejected,
        "real_tokens": sum(len(s[f"{side}_input_ids"]) for s in samples for side in _SIDES),
        "shared_tokens": sum(sample["num_shared"] for sample in samples),
        "positions": inputs["tokens"].numel(),
    }
    pairs = Pairs(
        of_pairs.flatten(),
        tuple(sample["name"] for sample in samples),
        tuple(sample.get("key", b"") for sample in samples),
    )
    positions = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    return Microbatch(inputs, Targets(labels, positions, pairs=pairs), counts)
