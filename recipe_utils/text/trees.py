"""Sequences merged into trees of segments, so that a row computes a common beginning once.

:func:`merge` is for the sequences of one sample, :func:`share_beginnings` for samples of a packed row: of four
conversations behind one system prompt of 200 tokens, with 30, 50, 20 and 40 tokens of their own, the row has
340 positions instead of 940.

Two sequences share a position if all tokens up to it are equal and at most one of them has a target
there: no target counts twice or is lost, and no position has two. The target of a position is the label of
the next token of its sequence, and so are all columns beside labels.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from recipe_utils.text.documents import Document, chains, length_of, segments_of
from recipe_utils.text.images.sample import before_or_behind_images, joined_images
from recipe_utils.text.samples import TextSample, joined

_LEAST_COMMON = 16
"""Tokens of the shortest beginning that is shared."""
_LEAST_SAVED = 0.1
"""Fraction of a row's positions that must be saved: attention within trees is slower."""


class _Tokens(NamedTuple):
    """All tokens of the sequences, one after the other, in which places are indices [n]."""

    keys: np.ndarray
    """Tokens; of images numbers below 0, which are equal if the images are."""
    are_targets: np.ndarray
    """True where the label of the next token of the sequence is a target."""


class _Segment:
    """Places [n] of a segment's tokens and of its targets, what follows, and the positions of all that."""

    def __init__(self, places: np.ndarray, targets: np.ndarray, below: "Sequence[_Segment]" = ()) -> None:
        self.places, self.targets, self.below = places, targets, list(below)
        self.reach: int = len(places) + sum(child.reach for child in below)


def merge(sequences: Sequence[TextSample], max_tokens: int | None, ignore_index: int) -> TextSample:
    """Returns a sample of one tree, or of several of at most ``max_tokens`` that repeat what they share.

    Only a single sequence may be longer. Its tokens, labels and columns are in the order of the row.
    """
    lengths = np.array([len(sequence.tokens) for sequence in sequences])
    ends = lengths.cumsum()
    owners = np.repeat(np.arange(len(sequences)), lengths)

    labels = np.concatenate([sequence.labels for sequence in sequences])
    columns = {name: joined([s.columns[name] for s in sequences], name, sequences) for name in sequences[0].columns}
    flat = _Tokens(np.concatenate([sequence.keys for sequence in sequences]), labels != ignore_index)
    # From the last sequence on: a conversation's last turns have the longest history, and with as many branches
    # as fit, the next tree's history is shortest.
    roots, num_tokens, lasts = list[_Segment](), list[int](), ends - 1
    for index in reversed(range(len(sequences))):
        places = np.arange(ends[index] - lengths[index], ends[index])
        path = _path(roots[-1], places, flat) if roots else []
        num_new = len(places) - sum(num_shared for _, num_shared in path)
        if not roots or (max_tokens is not None and roots[-1].reach + num_new > max_tokens):
            roots.append(_Segment(places[:0], places[:0]))
            num_tokens.append(0)
            path, num_new = [], len(places)
        if not num_new:  # its last token is another one's, too
            segment, num_shared = path[-1]
            lasts[index] = segment.places[num_shared - 1]
        _insert(roots[-1], path, places, num_new, flat)
        num_tokens[-1] += len(places)
    # Depth first, position i of the row has the token of place places[i] and the target of targets[i].
    trees = [_in_order(root) for root in roots]
    places, targets, positions = np.concatenate([columns for columns, _ in trees], axis=1)
    rows = np.empty(len(flat.keys), dtype=np.int64)
    rows[places] = np.arange(len(places))
    images = [sequence.images for sequence in sequences if sequence.images is not None]
    return sequences[0]._replace(
        tokens=np.concatenate([sequence.tokens for sequence in sequences])[places],
        labels=labels[targets],
        documents=[document for _, document in trees],
        columns={name: column[targets] for name, column in columns.items()},
        firsts={},
        values={name: joined([s.values[name] for s in sequences], name, sequences) for name in sequences[0].values},
        sequences=(owners[targets], rows[lasts]),
        positions=positions,
        num_shared=[n - root.reach for n, root in zip(num_tokens, roots, strict=True)],
        images=joined_images(images).at(places) if images else None,
        others={},
    )


def sequences_of(sample: TextSample, ignore_index: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields tokens [t] of each merged sequence (:attr:`.TextSample.keys`), and beside them labels and columns [t] of its targets.

    They do not depend on how trees were cut.
    """
    owners, ends = sample.owners_and_ends()
    paths = [np.concatenate([np.arange(*each) for each in chain.ranges]) for chain in chains(sample.documents)]
    for index, end in enumerate(ends):
        path = next(path for path in paths if end in path)
        path = path[: path.searchsorted(end) + 1]
        before, made = path[:-1], {"tokens": sample.keys[path]}
        are_targets = (owners[before] == index) & (sample.labels[before] != ignore_index)
        for name, column in {"labels": sample.labels, **sample.columns}.items():
            nothing = ignore_index if name == "labels" else 0
            made[name] = np.full_like(column[path], nothing)
            made[name][1:][are_targets] = column[before][are_targets]
        yield made


def split_trees(sample: TextSample) -> list[TextSample]:
    """Returns a sample for each tree of a sample."""
    assert sample.sequences is not None
    assert sample.positions is not None
    trees, start = [], 0
    owners, ends = sample.sequences
    for document, num_shared in zip(sample.documents, sample.num_shared, strict=True):
        # A sequence belongs to the tree that has its last token; its number counts from 0 there.
        stop = start + length_of(document)
        here, which = slice(start, stop), np.flatnonzero((start <= ends) & (ends < stop))
        tree = sample._replace(
            tokens=sample.tokens[here],
            labels=sample.labels[here],
            documents=[document],
            columns={name: column[here] for name, column in sample.columns.items()},
            values={name: value[which] for name, value in sample.values.items()},
            sequences=(np.searchsorted(which, owners[here]), ends[which] - start),
            positions=sample.positions[here],
            num_shared=[num_shared],
            images=None if sample.images is None else sample.images.at(np.arange(start, stop)),
        )
        trees.append(tree)
        start = stop
    return trees


def _path(root: _Segment, places: np.ndarray, flat: _Tokens) -> list[tuple[_Segment, int]]:
    """Returns the segments that a sequence shares from the root on, and how many positions of each."""
    path, start, segment = list[tuple[_Segment, int]](), 0, root
    while segment.below and start < len(places):
        shared = [_num_shared(child, places[start:], flat) for child in segment.below]
        longest = max(shared)
        if longest == 0:
            break
        segment = segment.below[shared.index(longest)]
        path.append((segment, longest))
        start += longest
        if longest < len(segment.places):
            break
    # All of a sequence's images are shared, or none.
    most = before_or_behind_images(flat.keys[places], start)
    while start > most:
        segment, num_shared = path.pop()
        start -= num_shared
        if start < most:
            path.append((segment, most - start))
            start = most
    return path


def _num_shared(segment: _Segment, places: np.ndarray, flat: _Tokens) -> int:
    if flat.keys[segment.places[0]] != flat.keys[places[0]]:
        return 0
    end = min(len(segment.places), len(places))
    both = flat.are_targets[segment.targets[:end]] & flat.are_targets[places[:end]]
    return _first(both | (flat.keys[segment.places[:end]] != flat.keys[places[:end]]))


def _first(flags: np.ndarray) -> int:
    """Returns the index of the first True; the length if there is none."""
    return int(flags.argmax()) if flags.any() else len(flags)


def _insert(
    root: _Segment, path: Sequence[tuple[_Segment, int]], places: np.ndarray, num_new: int, flat: _Tokens
) -> None:
    """Adds a sequence behind the segments that it shares, with their targets that only it has."""
    start, last = 0, root
    root.reach += num_new
    for last, num_shared in path:
        if num_new and num_shared < len(last.places):
            rest = _Segment(last.places[num_shared:], last.targets[num_shared:], last.below)
            last.places, last.targets = last.places[:num_shared], last.targets[:num_shared]
            last.below = [rest]
        known, added = last.targets[:num_shared], places[start : start + num_shared]
        last.targets = np.append(np.where(flat.are_targets[added], added, known), last.targets[num_shared:])
        last.reach += num_new
        start += num_shared
    if num_new and path and not last.below:  # a sequence that ended here continues
        last.places, last.targets = (np.append(column, places[start:]) for column in (last.places, last.targets))
    elif num_new:
        last.below.append(_Segment(places[start:], places[start:]))


def _in_order(root: _Segment) -> tuple[np.ndarray, Document]:
    """Returns places of tokens and targets, and positions [3, n], depth first, and the document.

    The branch with most positions follows its parent: then few ranges of positions are ancestors.
    """
    columns, segments = [], []
    waiting = [(root, 0)]
    while waiting:
        segment, depth = waiting.pop()
        end = depth + len(segment.places)
        if segment is not root:
            columns.append(np.stack([segment.places, segment.targets, np.arange(depth, end)]))
            segments.append((len(segment.places), segment.reach))
        waiting += [(child, end) for child in sorted(segment.below, key=lambda child: child.reach)]
    document = segments[0][0] if len(segments) == 1 else tuple(segments)
    return np.concatenate(columns, axis=1), document


# ---- Samples of a row ---------------------------------------------------------------------------


class Shared(NamedTuple):
    """Samples of a row, of which some leave their beginning to another one."""

    samples: Sequence[TextSample]
    """In the order of the row."""
    starts: Sequence[int]
    """Positions at which each of them begins, in this order: 0, or behind what it shares."""
    documents: Sequence[Document]
    num_saved: int = 0
    """Positions that are not computed again."""


def share_beginnings(samples: Sequence[TextSample], ignore_index: int) -> Shared:
    """Makes one tree of samples that begin with the same tokens without targets, if it saves a tenth of all."""
    keys = [_beginning(sample, ignore_index) for sample in samples]
    # Sorted, so that samples of one tree are neighbors.
    order = sorted(range(len(samples)), key=lambda i: keys[i].tobytes())
    common = []
    for one, other in pairwise(order):
        end = min(len(keys[one]), len(keys[other]))
        common.append(before_or_behind_images(samples[one].keys, _first(keys[one][:end] != keys[other][:end])))
    # The best cut into trees, by a dynamic program: saved[j] are the positions that the first j samples save, the
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
    if saved[-1] < _LEAST_SAVED * sum(len(sample.tokens) for sample in samples):
        return apart(samples)
    starts, documents, end = list[int](), list[Document](), len(order)
    while end:
        of_tree, num_common = [samples[i] for i in order[first[end] : end]], shared[end]
        starts[:0] = [0, *[num_common] * (len(of_tree) - 1)]
        documents[:0] = [_tree_of(of_tree, num_common)] if len(of_tree) > 1 else of_tree[0].documents
        end = first[end]
    return Shared([samples[i] for i in order], starts, documents, saved[-1])


def apart(samples: Sequence[TextSample]) -> Shared:
    """Returns samples as they are."""
    documents = [document for sample in samples for document in sample.documents]
    return Shared(samples, [0] * len(samples), documents)


def _beginning(sample: TextSample, ignore_index: int) -> np.ndarray:
    """Returns the first tokens without a target or a branch, at most all but one; none of several documents."""
    if len(sample.documents) != 1 or (sample.positions is not None and sample.positions[0] != 0):
        return sample.tokens[:0]
    (length, _), *below = segments_of(sample.documents[0])
    end = length if below else length - 1
    return sample.keys[: _first(sample.labels[:end] != ignore_index)]


def _tree_of(samples: Sequence[TextSample], num_common: int) -> Document:
    """Returns the tree of samples, of one document each, that begin with the same positions."""
    num_positions = num_common + sum(len(sample.tokens) - num_common for sample in samples)
    segments = [(num_common, num_positions)]
    for sample in samples:
        (length, reach), *below = segments_of(sample.documents[0])
        rest = [(length - num_common, reach - num_common)] if length > num_common else []
        segments += [*rest, *below]
    return tuple(segments)
