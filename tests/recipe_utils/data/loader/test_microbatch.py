"""A microbatch is a value; the last one is marked."""

import pytest
import tiny
import torch

from recipe_utils.data.loader.microbatch import mark_last
from recipe_utils.data.text.collate import collate_packed_microbatch


def make_microbatch():
    return collate_packed_microbatch(tiny.make_samples(3), tiny.IGNORE)


@pytest.mark.parametrize(
    ("items", "marked"),
    [
        ([], []),
        (["a"], [("a", True)]),
        (["a", "b", "c"], [("a", False), ("b", False), ("c", True)]),
    ],
)
def test_the_last_item_is_known(items, marked):
    assert list(mark_last(items)) == marked
    assert list(mark_last(iter(items))) == marked


def test_no_more_than_one_item_is_looked_at_ahead():
    taken = []
    marked = mark_last(taken.append(i) or i for i in range(4))
    for number in range(1, 5):
        next(marked)
        assert len(taken) == min(number + 1, 4)


def test_what_a_teacher_says_is_added_to_a_copy():
    microbatch = make_microbatch()
    said = {"logits": torch.ones(3, 2), "ids": [torch.zeros(1)]}
    taught = microbatch.with_teacher(said)
    assert taught.targets.teacher is said
    assert taught.targets.labels is microbatch.targets.labels
    assert taught.targets.positions is microbatch.targets.positions
    assert (taught.inputs, taught.counts) == (microbatch.inputs, microbatch.counts)
    assert microbatch.targets.teacher is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pinned_memory_is_that_of_a_copy_with_the_teachers_word():
    microbatch = make_microbatch().with_teacher([torch.ones(2)])
    pinned = microbatch.pin_memory()
    for tensor in (
        pinned.inputs["tokens"],
        pinned.targets.labels,
        pinned.targets.positions,
        pinned.targets.teacher[0],
    ):
        assert tensor.is_pinned()
    assert not microbatch.inputs["tokens"].is_pinned()
    assert pinned.inputs["document_lengths"] == microbatch.inputs["document_lengths"]
    assert pinned.counts == microbatch.counts
    assert torch.equal(pinned.targets.labels, microbatch.targets.labels)
