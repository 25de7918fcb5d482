"""Sequences of one sample, merged into trees of segments that compute common beginnings once.

Two sequences share a position if all tokens up to it are equal and at most one of them has a target
there: no target counts twice or is lost, and no position has two. The target of a position is the label of
the next token of its sequence.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from recipe_utils.data.loader.samples import Sample
from recipe_utils.data.text.documents import Document, length_of

OF_TREES = ("input_pos", "documents", "num_shared")
"""Keys of a sample of trees, besides tokens and labels."""


class _Segment:
    """Tokens and next labels [n] of a segment, what follows, and the positions of all that."""

    def __init__(
        self, tokens: np.ndarray, nexts: np.ndarray, below: "Sequence[_Segment]" = ()
    ) -> None:
        self.tokens, self.nexts, self.below = tokens, nexts, list(below)
        self.reach: int = len(tokens) + sum(each.reach for each in below)


def makes_trees(dataset: Any) -> bool:
    """Returns True if samples of a dataset, or of one of its parts, may have ``sequences``."""
    parts: Sequence[Any] = getattr(dataset, "parts", getattr(dataset, "_datasets", ()))
    return getattr(dataset, "makes_trees", False) or any(map(makes_trees, parts))


def merge(sequences: Sequence[Sample], max_tokens: int | None, ignore_index: int) -> Sample:
    """Returns a sample of one tree, or of several of at most ``max_tokens`` that repeat what they share.

    Merging starts at the last sequence: a conversation's last turns have the longest history, and with as
    many branches as fit, the next tree's history is shortest. Only a single sequence may be longer.

    Args:
        sequences: each with ``tokens`` and ``labels``, arrays of one length.
        max_tokens: most positions of a tree; None for any number.
        ignore_index: label of positions that are not targets.

    Returns:
        ``tokens``, ``labels`` and ``input_pos`` in the order of the row; a label is that of the position
        before it in this order, not of the token before it. ``documents`` are the trees, and ``num_shared``
        the positions that each saves.
    """
    roots, num_tokens = list[_Segment](), list[int]()
    for sequence in reversed(sequences):
        tokens, nexts = sequence["tokens"], np.append(sequence["labels"][1:], ignore_index)
        path = _path(roots[-1], tokens, nexts, ignore_index) if roots else []
        num_new = len(tokens) - sum(num_shared for _, num_shared in path)
        if not roots or (max_tokens is not None and roots[-1].reach + num_new > max_tokens):
            roots.append(_Segment(tokens[:0], nexts[:0]))
            num_tokens.append(0)
            path, num_new = [], len(tokens)
        _insert(roots[-1], path, tokens, nexts, num_new, ignore_index)
        num_tokens[-1] += len(tokens)
    trees = [_in_order(root) for root in roots]
    columns = np.concatenate([column for column, _ in trees], axis=1)
    return {
        "tokens": columns[0],
        "labels": np.append(ignore_index, columns[1, :-1]),
        "input_pos": columns[2],
        "documents": [document for _, document in trees],
        "num_shared": [n - root.reach for n, root in zip(num_tokens, roots, strict=True)],
    }


def split_trees(sample: Sample) -> list[Sample]:
    """Returns a sample for each tree of a sample."""
    ends = np.cumsum(list(map(length_of, sample["documents"])))[:-1]
    parts: dict[str, Any] = {
        key: np.split(sample[key], ends) for key in ("tokens", "labels", "input_pos")
    }
    parts |= {key: [[each] for each in sample[key]] for key in ("documents", "num_shared")}
    return [
        {**sample, **{key: values[i] for key, values in parts.items()}}
        for i in range(len(sample["documents"]))
    ]


def _path(
    root: _Segment, tokens: np.ndarray, nexts: np.ndarray, ignore_index: int
) -> list[tuple[_Segment, int]]:
    """Returns the segments that a sequence shares from the root on, and how many positions of each."""
    path, start, segment = list[tuple[_Segment, int]](), 0, root
    while segment.below and start < len(tokens):
        rest = tokens[start:], nexts[start:], ignore_index
        shared = [_num_shared(each, *rest) for each in segment.below]
        longest = max(shared)
        if longest == 0:
            break
        segment = segment.below[shared.index(longest)]
        path.append((segment, longest))
        start += longest
        if longest < len(segment.tokens):
            break
    return path


def _num_shared(segment: _Segment, tokens: np.ndarray, nexts: np.ndarray, ignore_index: int) -> int:
    if segment.tokens[0] != tokens[0]:
        return 0
    end = min(len(segment.tokens), len(tokens))
    both = (segment.nexts[:end] != ignore_index) & (nexts[:end] != ignore_index)
    differs = both | (segment.tokens[:end] != tokens[:end])
    return int(differs.argmax()) if differs.any() else end


def _insert(
    root: _Segment,
    path: Sequence[tuple[_Segment, int]],
    tokens: np.ndarray,
    nexts: np.ndarray,
    num_new: int,
    ignore_index: int,
) -> None:
    """Adds a sequence behind the segments that it shares, with their targets that only it has."""
    start, last = 0, root
    root.reach += num_new
    for last, num_shared in path:
        if num_new and num_shared < len(last.tokens):
            rest = _Segment(last.tokens[num_shared:], last.nexts[num_shared:], last.below)
            last.tokens, last.nexts = last.tokens[:num_shared], last.nexts[:num_shared]
            last.below = [rest]
        known, added = last.nexts[:num_shared], nexts[start : start + num_shared]
        filled = np.where(known == ignore_index, added, known)
        last.nexts = np.append(filled, last.nexts[num_shared:])
        last.reach += num_new
        start += num_shared
    if num_new and path and not last.below:  # a sequence that ended here continues
        last.tokens = np.append(last.tokens, tokens[start:])
        last.nexts = np.append(last.nexts, nexts[start:])
    elif num_new:
        last.below.append(_Segment(tokens[start:], nexts[start:]))


def _in_order(root: _Segment) -> tuple[np.ndarray, Document]:
    """Returns tokens, next labels and positions [3, n] depth first, and the document.

    The branch with most positions follows its parent: then few ranges of positions are ancestors.
    """
    columns, segments = [], []
    waiting = [(root, 0)]
    while waiting:
        segment, depth = waiting.pop()
        end = depth + len(segment.tokens)
        if segment is not root:
            columns.append(np.stack([segment.tokens, segment.nexts, np.arange(depth, end)]))
            segments.append((len(segment.tokens), segment.reach))
        waiting += [(each, end) for each in sorted(segment.below, key=lambda each: each.reach)]
    document = segments[0][0] if len(segments) == 1 else tuple(segments)
    return np.concatenate(columns, axis=1), document
