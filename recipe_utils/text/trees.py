"""Sequences merged into trees of segments, so that a row computes a common beginning once.

:func:`merge` is for the sequences of one sample, :func:`share_beginnings` for samples of a packed row: of four
conversations behind one system prompt of 200 tokens, with 30, 50, 20 and 40 tokens of their own, the row has
340 positions instead of 940.

Two sequences share a position if all tokens up to it are equal and at most one of them has a target
there: no target counts twice or is lost, and no position has two. The target of a position is the label of
the next token of its sequence.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from recipe_utils.text.documents import Document, length_of, segments_of
from recipe_utils.update_steps.samples import Sample

TREE_KEYS = ("input_pos", "documents", "num_shared")
"""Keys of a sample of trees, besides tokens and labels."""
_LEAST_COMMON = 16
"""Tokens of the shortest beginning that is shared."""
_LEAST_SAVED = 0.1
"""Fraction of a row's positions that must be saved: attention within trees is slower."""


class Piece(NamedTuple):
    """Whole documents of a row."""

    columns: Tensor
    """[3, n] int64: tokens, labels of the next positions (in a segment, of its own sequence), positions."""
    documents: Sequence[Document]


class _Segment:
    """Tokens and next labels [n] of a segment, what follows, and the positions of all that."""

    def __init__(self, tokens: np.ndarray, nexts: np.ndarray, below: "Sequence[_Segment]" = ()) -> None:
        self.tokens, self.nexts, self.below = tokens, nexts, list(below)
        self.reach: int = len(tokens) + sum(child.reach for child in below)


def makes_trees(dataset: Any) -> bool:
    """Returns True if samples of a dataset, or of one of its parts, may have ``sequences``."""
    parts: Sequence[Any] = getattr(dataset, "parts", getattr(dataset, "_datasets", ()))
    return getattr(dataset, "makes_trees", False) or any(map(makes_trees, parts))


def merge(sequences: Sequence[Sample], max_tokens: int | None, ignore_index: int) -> Sample:
    """Returns a sample of one tree, or of several of at most ``max_tokens`` that repeat what they share.

    Each sequence has ``tokens`` and ``labels``, arrays of one length; only a single one may be longer.

    Returns:
        ``tokens``, ``labels`` and ``input_pos`` in the order of the row; a label is that of the position
        before it in this order, not of the token before it. ``documents`` are the trees, and ``num_shared``
        the positions that each saves.
    """
    # From the last sequence on: a conversation's last turns have the longest history, and with as many branches
    # as fit, the next tree's history is shortest.
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
    parts: dict[str, Any] = {key: np.split(sample[key], ends) for key in ("tokens", "labels", "input_pos")}
    parts |= {key: [[value] for value in sample[key]] for key in ("documents", "num_shared")}
    return [{**sample, **{key: values[i] for key, values in parts.items()}} for i in range(len(sample["documents"]))]


def _path(root: _Segment, tokens: np.ndarray, nexts: np.ndarray, ignore_index: int) -> list[tuple[_Segment, int]]:
    """Returns the segments that a sequence shares from the root on, and how many positions of each."""
    path, start, segment = list[tuple[_Segment, int]](), 0, root
    while segment.below and start < len(tokens):
        rest = tokens[start:], nexts[start:], ignore_index
        shared = [_num_shared(child, *rest) for child in segment.below]
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
    return _first(both | (segment.tokens[:end] != tokens[:end]))


def _first(flags: np.ndarray) -> int:
    """Returns the index of the first True; the length if there is none."""
    return int(flags.argmax()) if flags.any() else len(flags)


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
        waiting += [(child, end) for child in sorted(segment.below, key=lambda child: child.reach)]
    document = segments[0][0] if len(segments) == 1 else tuple(segments)
    return np.concatenate(columns, axis=1), document


# ---- Samples of a row ---------------------------------------------------------------------------


def share_beginnings(pieces: Sequence[Piece], ignore_index: int) -> tuple[Sequence[int], Sequence[Piece], int]:
    """Makes one tree of pieces that begin with the same tokens without targets, if it saves a tenth of all.

    Returns the order of the pieces, the pieces in this order (the first of a tree has its document, the
    others have none), and the number of positions saved.
    """
    keys = [_beginning(piece, ignore_index) for piece in pieces]
    # Sorted, so that pieces of one tree are neighbors.
    order = sorted(range(len(pieces)), key=lambda i: keys[i].tobytes())
    common = []
    for one, other in pairwise(order):
        end = min(len(keys[one]), len(keys[other]))
        common.append(_first(keys[one][:end] != keys[other][:end]))
    # The best cut into trees, by a dynamic program: saved[j] are the positions that the first j pieces save, the
    # last of which is in a tree with those from first[j] on.
    saved, first, shared = [0], [0], [0]
    for j in range(1, len(order) + 1):
        best, least = (saved[-1], j - 1, 0), len(keys[order[j - 1]])
        for i in reversed(range(j - 1)):
            if (least := min(least, common[i])) < _LEAST_COMMON:
                break
            best = max(best, (saved[i] + (j - 1 - i) * least, i, least))
        for values, value in zip((saved, first, shared), best, strict=True):
            values.append(value)
    if saved[-1] < _LEAST_SAVED * sum(piece.columns.size(1) for piece in pieces):
        return range(len(pieces)), pieces, 0
    merged, end = list[Piece](), len(order)
    while end:
        tree_pieces = [pieces[i] for i in order[first[end] : end]]
        merged[:0] = _one_tree(tree_pieces, shared[end]) if len(tree_pieces) > 1 else tree_pieces
        end = first[end]
    return order, merged, saved[-1]


def _beginning(piece: Piece, ignore_index: int) -> np.ndarray:
    """Returns the first tokens without a target or a branch, at most all but one; none of several documents."""
    tokens, labels, positions = piece.columns.numpy()
    if len(piece.documents) != 1 or positions[0] != 0:
        return tokens[:0]
    (length, _), *below = segments_of(piece.documents[0])
    end = length if below else length - 1
    return tokens[: _first(labels[:end] != ignore_index)]


def _one_tree(pieces: Sequence[Piece], num_common: int) -> list[Piece]:
    """Removes the positions that all pieces, of one document each, begin with from all but the first."""
    columns = [pieces[0].columns, *(piece.columns[:, num_common:] for piece in pieces[1:])]
    segments = [(num_common, sum(column.size(1) for column in columns))]
    for piece in pieces:
        (length, reach), *below = segments_of(piece.documents[0])
        rest = [(length - num_common, reach - num_common)] if length > num_common else []
        segments += [*rest, *below]
    return [Piece(column, [] if i else [tuple(segments)]) for i, column in enumerate(columns)]
