"""The documents of a microbatch are the same as numbers and as tensors, in every process."""

import pickle
import random

import pytest
import torch
from forests import FOREST, mask_of, sequences_of, some_tree
from torch.utils._pytree import tree_leaves

from recipe_utils.parallel.to_device import to_device_ahead
from recipe_utils.text.documents import Documents, chains, length_of, tree

PLAIN = [[3, 1, 4], [8]]
TREES = [[tree(2, 3, 1), 4], [tree(1, 1, tree(3, 2, 3))]]


def test_a_tree_is_its_segments_depth_first():
    assert tree(5, 3, tree(2, 1, 4)) == ((5, 15), (3, 3), (2, 7), (1, 1), (4, 4))
    assert length_of(tree(5, 3, tree(2, 1, 4))) == 15


@pytest.mark.parametrize("lengths", [PLAIN, TREES, [[1]], [[tree(3, 1, 1)]], [FOREST]])
def test_each_key_has_the_end_of_its_queries(lengths):
    documents = Documents(lengths)
    ends = documents.last_queries()
    assert (documents.ends is None) == (lengths in (PLAIN, [[1]]))
    assert documents.shape == tuple(ends.shape)
    assert ends.dtype == documents.cu_seqlens.dtype == torch.int32
    at = torch.arange(ends.shape[1])
    for row, of_row in zip(lengths, ends, strict=True):
        seen = (at <= at[:, None]) & (at[:, None] < of_row)
        assert seen.tolist() == mask_of(row)


def test_no_segment_is_empty():
    documents = Documents([[3, 0, 2, tree(0, 2, 1), tree(4, 0, 1), tree(1, 2, 0)]])
    assert documents.cu_seqlens.tolist() == [0, 3, 5, 7, 8, 12, 13, 14, 16]
    assert [(c.stop - c.start, c.ancestors) for c in chains(documents[0])] == [
        (size, ()) for size in (3, 2, 2, 1, 5, 3)
    ]


def test_chains_are_the_sequences_from_root_to_leaf():
    draw = random.Random(0)
    for row in [FOREST, *([some_tree(50, draw), 3, some_tree(40, draw)] for _ in range(50))]:
        found = list(chains(row))
        assert [[i for each in c.ranges for i in range(*each)] for c in found] == [*sequences_of(row)]
        assert [i for c in found for i in range(c.start, c.stop)] == [*range(sum(map(length_of, row)))]


def test_a_tree_of_as_many_levels_as_a_long_conversation_has_turns():
    below = 1
    for _ in range(1500):
        below = tree(2, below, 1)
    documents = pickle.loads(pickle.dumps(Documents([[below]])))
    assert documents == [[below]]
    assert len(list(chains(documents[0]))) == 1501
    assert repr(below)


def test_they_are_a_sequence_of_rows_equal_by_their_numbers():
    documents = Documents(PLAIN)
    assert list(documents) == PLAIN
    assert (documents[1], len(documents), documents.max_seqlen) == ([8], 2, 8)
    assert documents == Documents(PLAIN) == PLAIN
    assert documents != Documents(TREES)
    assert Documents(TREES).max_seqlen == 10  # all segments included


@pytest.mark.parametrize("lengths", [PLAIN, TREES])
def test_they_are_pickled_and_copied_with_their_tensors(lengths):
    copy = pickle.loads(pickle.dumps(Documents(lengths)))
    assert copy == lengths
    for ours, theirs in zip(tree_leaves(copy), tree_leaves(Documents(lengths)), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)
    (moved,) = to_device_ahead([{"documents": copy}], torch.device("meta"))
    assert moved["documents"] == lengths
    assert all(leaf is None or leaf.is_meta for leaf in tree_leaves(moved))
