"""The documents of a microbatch are the same as numbers and as tensors, wherever they go."""

import pickle

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from recipe_utils.data.loader.to_device import to_device_ahead
from recipe_utils.data.text.documents import Documents, segment_lengths

PLAIN = [[3, 1, 4], [8]]
PREFIX_SHARED = [[(2, 3, 1), 4], [(1, 1, 8)]]


def slots_one_by_one(lengths):
    """The document and the end of each slot, counted."""
    documents, ends, number = [], [], -1
    for row in lengths:
        for document in row:
            number += 1
            parts = document if isinstance(document, tuple) else (document,)
            for end, size in enumerate(parts):
                documents += [number] * size
                ends += [end] * size
    return documents, ends


@pytest.mark.parametrize("lengths", [PLAIN, PREFIX_SHARED, [[1]], [[(3, 1, 1)]]])
def test_tensors_say_what_the_numbers_say(lengths):
    documents = Documents(lengths)
    expected_documents, expected_ends = slots_one_by_one(lengths)
    document_of, end_of = documents.of_positions()
    assert document_of.flatten().tolist() == expected_documents
    assert ([0] * len(expected_ends) if end_of is None else end_of.flatten().tolist()) == (
        expected_ends
    )
    assert documents.shape == tuple(document_of.shape)
    sizes = documents.boundaries.diff().tolist()
    assert sizes == [size for row in lengths for size in segment_lengths(row)]
    assert documents.boundaries.dtype == torch.int32
    assert (documents.segments is None) == (lengths in (PLAIN, [[1]]))


def test_no_part_is_empty():
    documents = Documents([[3, 0, 2, (0, 2, 1), (4, 0, 1), (1, 2, 0)]])
    assert documents.boundaries.tolist() == [0, 3, 5, 7, 8, 13, 16]
    document_of, end_of = documents.of_positions()
    assert end_of is None
    assert document_of[0].bincount().tolist() == [3, 2, 2, 1, 5, 3]


def test_they_are_a_sequence_of_rows_equal_by_their_numbers():
    documents = Documents(PLAIN)
    assert list(documents) == PLAIN
    assert (documents[1], len(documents), documents.longest) == ([8], 2, 8)
    assert documents == PLAIN
    assert documents == Documents(PLAIN)
    assert documents != Documents(PREFIX_SHARED)
    assert Documents(PREFIX_SHARED).longest == 10  # both answers included


@pytest.mark.parametrize("lengths", [PLAIN, PREFIX_SHARED])
def test_they_go_from_process_to_process(lengths):
    arrived = pickle.loads(pickle.dumps(Documents(lengths)))
    assert arrived == lengths
    for ours, sent in zip(tree_leaves(arrived), tree_leaves(Documents(lengths)), strict=True):
        assert ours is sent is None or torch.equal(ours, sent)


def test_their_tensors_go_to_the_device_with_what_they_are_part_of():
    tree = {"document_lengths": Documents(PREFIX_SHARED), "tokens": torch.zeros(2, 10)}
    (arrived,) = to_device_ahead([tree], torch.device("meta"))
    documents = arrived["document_lengths"]
    assert documents == PREFIX_SHARED
    assert documents.boundaries.is_meta
    assert documents.segments.is_meta
    counted = []
    tree_map_only(torch.Tensor, counted.append, tree)
    assert len(counted) == 3
