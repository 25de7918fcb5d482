"""A microbatch is a value; the last one is marked."""

import pytest
import tiny
import torch

from recipe_utils.data.loader.microbatch import mark_last
from recipe_utils.data.text.collate import collate_packed_microbatch


@pytest.fixture
def microbatch():
    return collate_packed_microbatch(tiny.make_samples(3), tiny.IGNORE)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_last_item_is_marked_and_one_item_is_taken_ahead(number):
    taken = []
    marked = mark_last(taken.append(i) or i for i in range(number))
    for i, found in enumerate(marked):
        assert found == (i, i == number - 1)
        assert len(taken) == min(i + 2, number)
    assert len(taken) == number


def test_outputs_of_a_teacher_are_added_to_a_copy(microbatch):
    outputs = {"logits": torch.ones(3, 2), "ids": [torch.zeros(1)]}
    taught = microbatch.with_teacher(outputs)
    assert taught.targets.teacher is outputs
    assert taught.targets.labels is microbatch.targets.labels
    assert (taught.inputs, taught.counts) == (microbatch.inputs, microbatch.counts)
    assert microbatch.targets.teacher is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_copy_is_pinned_with_the_outputs_of_a_teacher(microbatch):
    pinned = microbatch.with_teacher([torch.ones(2)]).pin_memory()
    targets = pinned.targets
    tensors = (pinned.inputs["tokens"], targets.labels, targets.positions, targets.teacher[0])
    assert all(tensor.is_pinned() for tensor in tensors)
    assert not microbatch.inputs["tokens"].is_pinned()
    assert pinned.inputs["document_lengths"] == microbatch.inputs["document_lengths"]
    assert pinned.counts == microbatch.counts
