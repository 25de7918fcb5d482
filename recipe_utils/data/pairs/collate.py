"""Microbatches of preference pairs, padded or packed.

Shapes: p pairs, b rows, s positions per row, n target tokens of all p pairs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recipe_utils.data.loader.microbatch import Microbatch, Pairs, Targets
from recipe_utils.data.loader.samples import Sample
from recipe_utils.data.plan.plan import WHOLE, Part
from recipe_utils.data.text.collate import cut_part
from recipe_utils.data.text.documents import Documents

IGNORE_INDEX = -100
"""Label of positions without a target in torchtune's preference datasets."""

SIDES = ("chosen", "rejected")


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


def collate_padded_pairs(samples: Sequence[Sample], padding_idx: int) -> Microbatch:
    """Makes a microbatch of two rows per pair, chosen before rejected, padded to the longest."""
    sides = [_segment_of(sample, side) for sample in samples for side in SIDES]
    tokens = pad_sequence([ids for ids, _, _ in sides], batch_first=True, padding_value=padding_idx)
    labels = pad_sequence(
        [ids for _, ids, _ in sides], batch_first=True, padding_value=IGNORE_INDEX
    )
    return padded_rows(tokens, labels, samples)


def padded_rows(tokens: Tensor, labels: Tensor, samples: Sequence[Sample]) -> Microbatch:
    """Makes a microbatch of rows [b, s] with shifted labels, two for each of ``samples``."""
    of_answers = (labels != IGNORE_INDEX).sum(1)[: 2 * len(samples)].view(-1, 2)
    return _microbatch({"tokens": tokens}, labels, samples, F.pad(of_answers, (1, 0)))


def collate_packed_pairs(
    samples: Sequence[Sample],
    padding_idx: int = 0,
    row_multiple: int | None = None,
    part: Part = WHOLE,
) -> Microbatch:
    """Makes a microbatch of one row, or of a part of it: for each pair the shared prefix and both rests.

    Neither rest attends to the other; positions of both continue those of the prefix. Each part is
    padded to a multiple of ``row_multiple`` tokens, the row with one more document.
    """
    row_multiple = (row_multiple or 1) * part.num_ranks
    segments: list[Tensor] = []
    lengths: list[Any] = []
    for sample in samples:
        chosen, rejected = (_segment_of(sample, side) for side in SIDES)
        shared, chosen = chosen.tensor_split([sample["num_shared"]], dim=1)
        rejected = rejected[:, sample["num_shared"] :]
        segments += [shared, chosen, rejected]
        of_pair = tuple(segment.size(1) for segment in (shared, chosen, rejected))
        lengths += [of_pair] if of_pair[0] else of_pair[1:]
    row = packed_row(segments, lengths, samples, padding_idx, row_multiple)
    return cut_part(row, part, len(samples))


def _segment_of(sample: Sample, side: str) -> Tensor:
    """Returns tokens, shifted labels and positions of one side, [3, s]."""
    tokens = torch.from_numpy(sample[f"{side}_input_ids"])
    labels = torch.from_numpy(sample[f"{side}_labels"]).roll(-1)
    labels[-1] = IGNORE_INDEX
    return torch.stack([tokens, labels, torch.arange(len(tokens))])


def packed_row(
    segments: Sequence[Tensor],
    lengths: Sequence[Any],
    samples: Sequence[Sample],
    padding_idx: int,
    row_multiple: int | None,
) -> Microbatch:
    """Makes a microbatch of one row of segments [3, .], three per pair; ``lengths`` are of documents."""
    of_segments = [int((segment[1] != IGNORE_INDEX).sum()) for segment in segments]
    of_pairs = torch.tensor(of_segments[: 3 * len(samples)], dtype=torch.long).view(-1, 3)
    num_real = sum(segment.size(1) for segment in segments)
    if row_multiple is not None and num_real % row_multiple:
        padding = torch.tensor([[padding_idx], [IGNORE_INDEX], [0]])
        segments = [*segments, padding.expand(3, -num_real % row_multiple)]
        lengths = [*lengths, -num_real % row_multiple]
    tokens, labels, positions = torch.cat(list(segments), dim=1).unsqueeze(1)
    documents = Documents([list(lengths)])
    inputs = {"tokens": tokens, "input_pos": positions, "document_lengths": documents}
    return _microbatch(inputs, labels, samples, of_pairs)


def _microbatch(
    inputs: dict[str, Any], labels: Tensor, samples: Sequence[Sample], of_pairs: Tensor
) -> Microbatch:
    """Makes a microbatch; ``labels`` [b, s] are shifted, ``of_pairs`` [p, 3] are targets by segment."""
    shared, chosen, rejected = of_pairs.sum(0).tolist()
    counts = {
        "pairs": len(samples),
        "chosen_tokens": shared + chosen,
        "target_tokens": 2 * shared + chosen + rejected,
        "real_tokens": sum(len(s[f"{side}_input_ids"]) for s in samples for side in SIDES),
        "shared_tokens": sum(sample["num_shared"] for sample in samples),
        "positions": inputs["tokens"].numel(),
    }
    pairs = Pairs(of_pairs.flatten(), tuple(sample["name"] for sample in samples))
    positions = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    return Microbatch(inputs, Targets(labels, positions, pairs=pairs), counts)
