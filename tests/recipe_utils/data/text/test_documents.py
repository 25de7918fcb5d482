"""The documents of a microbatch are the same as numbers and as tensors, in every process."""

import pickle

import pytest
import torch
from torch.utils._pytree import tree_leaves

from recipe_utils.data.loader.to_device import to_device_ahead
from recipe_utils.data.text.documents import Documents, segment_lengths

PLAIN = [[3, 1, 4], [8]]
PREFIX_SHARED = [[(2, 3, 1), 4], [(1, 1, 8)]]


def positions_one_by_one(lengths):
    """Document and branch of each position."""
    documents, branches = [], []
    for number, document in enumerate(document for row in lengths for document in row):
        for branch, size in enumerate(segment_lengths([document])):
            documents += [number] * size
            branches += [branch] * size
    return documents, branches


@pytest.mark.parametrize("lengths", [PLAIN, PREFIX_SHARED, [[1]], [[(3, 1, 1)]]])
def test_tensors_are_equal_to_the_numbers(lengths):
    documents = Documents(lengths)
    expected_documents, expected_branches = positions_one_by_one(lengths)
    document_of, branch_of = documents.of_positions()
    assert document_of.flatten().tolist() == expected_documents
    assert (branch_of is None) == (lengths in (PLAIN, [[1]]))
    if branch_of is not None:
        assert branch_of.flatten().tolist() == expected_branches
    assert documents.shape == tuple(document_of.shape)
    sizes = documents.boundaries.diff().tolist()
    assert sizes == [size for row in lengths for size in segment_lengths(row)]
    assert documents.boundaries.dtype == torch.int32


def test_no_segment_is_empty():
    documents = Documents([[3, 0, 2, (0, 2, 1), (4, 0, 1), (1, 2, 0)]])
    assert documents.boundaries.tolist() == [0, 3, 5, 7, 8, 13, 16]
    document_of, branch_of = documents.of_positions()
    assert branch_of is None
    assert document_of[0].bincount().tolist() == [3, 2, 2, 1, 5, 3]


def test_they_are_a_sequence_of_rows_equal_by_their_numbers():
    documents = Documents(PLAIN)
    assert list(documents) == PLAIN
    assert (documents[1], len(documents), documents.longest) == ([8], 2, 8)
    assert documents == Documents(PLAIN) == PLAIN
    assert documents != Documents(PREFIX_SHARED)
    assert Documents(PREFIX_SHARED).longest == 10  # both answers included


@pytest.mark.parametrize("lengths", [PLAIN, PREFIX_SHARED])
def test_they_are_pickled_and_copied_with_their_tensors(lengths):
    copy = pickle.loads(pickle.dumps(Documents(lengths)))
    assert copy == lengths
    for ours, theirs in zip(tree_leaves(copy), tree_leaves(Documents(lengths)), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)
    (moved,) = to_device_ahead([{"documents": copy}], torch.device("meta"))
    assert moved["documents"] == lengths
    assert all(leaf is None or leaf.is_meta for leaf in tree_leaves(moved))
