"""Collator of preference pairs, padded or packed.

Both answers of a pair are in one microbatch. If packed, their common prefix is computed once.

Example: the sides ``u v w A B`` and ``u v w C``, targets in capitals, begin with the same 3 tokens. The last of them
predicts A or C, so they share 2. The row ``u v  w A B  w C`` is the tree (2, 3, 2): 7 positions instead of 9. Its
segments have 0, 2 and 1 targets. Shapes: p pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor
from torchtune.data import padded_collate_sft

import recipe_utils.preference.torchtune_pairs  # noqa: F401  corrects torchtune
from recipe_utils.preference.log_probs import Pairs
from recipe_utils.preference.rows import SIDES
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import Problem
from recipe_utils.text.collator import RowCollator, check_sample
from recipe_utils.text.documents import tree
from recipe_utils.text.limits import ModelLimits
from recipe_utils.text.rows import packed, padded, piece_of
from recipe_utils.text.trees import Piece
from recipe_utils.update_steps.samples import Sample, SkippedSampleError, check_keys, whole_numbers
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import Microbatch

IGNORE_INDEX = -100
"""Label of positions without a target in torchtune's preference datasets."""


@dataclass(frozen=True, config=STRICT)
class PairSettings:
    """Settings of pairs, besides those of all samples."""

    prefix_sharing: bool | None = None
    """Computes the common prefix of a pair's sides once; null is True with ``microbatching: packed``."""

    def problems_of_pairs(self, data: DataSettings) -> Iterator[Problem]:
        """Yields values of the data keys that pairs do not support."""
        if self.prefix_sharing and not data.is_packed:
            text = f"microbatching={data.microbatching} gives each side a row of its own; set microbatching=packed"
            yield Problem("prefix_sharing", text, True)
        if data.collate_fn != DataSettings.collate_fn:
            text = "pairs are collated in one way only; remove the key"
            yield Problem("collate_fn", text, data.collate_fn)
        if data.max_ranks_per_row > 1:
            text = "one rank computes both answers of a pair; remove the key"
            yield Problem("max_ranks_per_row", text, data.max_ranks_per_row)


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


class PairCollator(RowCollator):
    """Collator of pairs as torchtune's preference datasets return them.

    ``batch_size`` counts pairs. Raises ConfigError if the model does not support ``microbatching: packed``.
    """

    noun = "pair"
    counts = (
        "pairs", "chosen_tokens", "target_tokens", "real_tokens", "shared_tokens", "positions",
    )  # fmt: skip
    """Pairs; targets of chosen answers; targets and tokens of both answers;
    tokens computed once instead of twice; computed positions."""
    fingerprint_keys = tuple(f"{side}_{key}" for side in SIDES for key in ("input_ids", "labels"))

    def __init__(
        self, settings: DataSettings, tokenizer: Any, limits: ModelLimits, prefix_sharing: bool | None = None
    ) -> None:
        trees = ("prefix_sharing=True", "set prefix_sharing=False")
        shares_prefixes = settings.is_packed and prefix_sharing is not False
        super().__init__(settings, tokenizer, limits, 2, trees if shares_prefixes else None)
        self.layout = "packed" if settings.is_packed else "padded"
        """Layout of rows; the rounding of log-probabilities depends on it."""
        if shares_prefixes:
            self.layout += ", prefixes shared"

    def remarks(self, sample: Sample) -> Iterator[str]:
        """Yields a text if a pair is probably truncated, or its sides are no answers to one prompt."""
        lengths = {side: len(sample[f"{side}_input_ids"]) for side in SIDES}
        if self.max_seq_len in lengths.values():
            yield f"a side of tokenizer.max_seq_len={self.max_seq_len} tokens, probably truncated"
        prompts = []
        for side in SIDES:
            labels = sample[f"{side}_labels"]
            first_target = int((labels != IGNORE_INDEX).argmax())
            prompts.append(sample[f"{side}_input_ids"][:first_target].tolist())
        if prompts[0] != prompts[1]:
            yield "its two sides differ before their first target"

    def prepare(self, sample: Sample, name: str) -> Sample:
        """Returns the pair as arrays, with name, fingerprint and number of shared tokens; masks shared turns.

        Raises SampleError (see :func:`recipe_utils.text.collator.check_sample`);
        SkippedSampleError if a side has no target, or the sides are equal.
        """
        # Each side is checked as a sample of its own.
        pair: dict[str, Any] = {"name": name.replace("sample", "pair", 1)}
        for side in SIDES:
            keys = (f"{side}_input_ids", f"{side}_labels")
            check_keys(sample, keys, name)
            tokens, labels = (whole_numbers(sample, key, name) for key in keys)
            check_sample({"tokens": tokens, "labels": labels}, f"{name}, {side}", IGNORE_INDEX, self.limits)
            # The first token is never predicted.
            if (labels[1:] == IGNORE_INDEX).all():
                raise SkippedSampleError(f"{name}: its {side} side has no target")
            pair |= dict(zip(keys, (tokens, labels), strict=True))
        mask_shared_turns(pair)
        num_shared = num_shared_tokens(pair)
        if num_shared is None:
            raise SkippedSampleError(f"{name}: its sides are equal")
        pair["num_shared"] = num_shared if self._trees else 0
        # By its fingerprint, the reference's log-probabilities of a pair are found again.
        digest = blake2b(digest_size=16)
        for key in self.fingerprint_keys:
            digest.update(len(pair[key]).to_bytes(8, "little") + pair[key].tobytes())
        pair["fingerprint"] = digest.digest()
        return pair

    def length(self, sample: Sample) -> int:
        """Returns the positions of a pair in a row; if padded, those of its longer side."""
        lengths = [len(sample[f"{side}_input_ids"]) for side in SIDES]
        return sum(lengths) - sample["num_shared"] if self.settings.is_packed else max(lengths)

    def dummy(self, sample: Sample) -> Microbatch:
        """Makes a microbatch of one token and no pair; its log-probabilities [0] have a graph."""
        token = {"tokens": sample["chosen_input_ids"][:1], "labels": np.array([IGNORE_INDEX])}
        return replace(self.collate([], token=token), counts={})

    def collate(self, samples: Sequence[Sample], token: Sample | None = None) -> Microbatch:
        """Makes a row of a tree for each pair, or two padded rows, chosen before rejected.

        ``token`` is appended as one more document.
        """
        sides = [{"tokens": s[f"{side}_input_ids"], "labels": s[f"{side}_labels"]} for s in samples for side in SIDES]
        others = [] if token is None else [token]
        if self.settings.is_packed:
            columns = [piece_of(side, IGNORE_INDEX).columns for side in sides]
            pieces, num_targets = [], torch.zeros(len(samples), 3, dtype=torch.long)
            tuples = zip(samples, columns[::2], columns[1::2], num_targets, strict=True)
            for sample, chosen, rejected, segment_targets in tuples:
                # Neither rest attends to the other; positions of both continue those of the prefix.
                shared = sample["num_shared"]
                segments = chosen[:, :shared], chosen[:, shared:], rejected[:, shared:]
                segment_targets.copy_(torch.stack([(segment[1] != IGNORE_INDEX).sum() for segment in segments]))
                lengths = [segment.size(1) for segment in segments]
                pieces.append(Piece(torch.cat(segments, dim=1), [tree(*lengths)] if shared else lengths[1:]))
            pieces += [piece_of(other, IGNORE_INDEX) for other in others]
            row = packed(pieces, IGNORE_INDEX, self.pad_id, self.row_multiple)
            return _with_pairs(row, samples, num_targets)
        pad = partial(padded_collate_sft, padding_idx=self.pad_id, ignore_idx=IGNORE_INDEX)
        row = padded([*sides, *others], pad, IGNORE_INDEX)
        num_targets = (row.targets.labels != IGNORE_INDEX).sum(1)[: len(sides)].view(-1, 2)
        return _with_pairs(row, samples, F.pad(num_targets, (1, 0)))


def _with_pairs(row: Microbatch, samples: Sequence[Sample], num_targets: Tensor) -> Microbatch:
    """Adds pairs; ``num_targets`` [p, 3] are targets by segment."""
    shared, chosen, rejected = num_targets.sum(0).tolist()
    counts = {
        "pairs": len(samples),
        "chosen_tokens": shared + chosen,
        "target_tokens": 2 * shared + chosen + rejected,
        "real_tokens": sum(len(s[f"{side}_input_ids"]) for s in samples for side in SIDES),
        "shared_tokens": sum(sample["num_shared"] for sample in samples),
        "positions": row.counts["positions"],
    }
    names, fingerprints = (tuple(s[key] for s in samples) for key in ("name", "fingerprint"))
    pairs = Pairs(num_targets.flatten(), names, fingerprints)
    positions = [sample["step_position"] for sample in samples if "step_position" in sample]
    targets = row.targets._replace(pairs=pairs, samples=torch.tensor(positions).long())
    return Microbatch(row.inputs, targets, counts)
