"""What keeps a checkpoint's tensors from going into a model is named, with both values."""

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from recipe_utils.checkpoint.tensors import describe_mismatch


def saved(**tensors):
    return {
        name: TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), [])
        for name, tensor in tensors.items()
    }


TENSORS = {"a": torch.zeros(2), "b": torch.zeros(3, 1)}


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (TENSORS, ""),
        ({**TENSORS, "c": torch.zeros(1)}, "it lacks c"),
        ({"a": torch.zeros(2)}, "it has b, which the model has not"),
        ({**TENSORS, "b": torch.zeros(3)}, "its shapes differ: b (3, 1) instead of (3,)"),
        (
            {**TENSORS, "a": torch.zeros(2, dtype=torch.bfloat16)},
            "its dtypes differ: a torch.float32 instead of torch.bfloat16",
        ),
        (
            {"b": torch.zeros(3), "c": torch.zeros(1)},
            "it lacks c; it has a, which the model has not; "
            "its shapes differ: b (3, 1) instead of (3,)",
        ),
    ],
)
def test_a_mismatch_is_described_with_every_difference(expected, words):
    assert describe_mismatch(saved(**TENSORS), expected) == words


def test_what_other_pipeline_stages_have_is_no_mismatch():
    own = {"a": TENSORS["a"]}
    assert describe_mismatch(saved(**TENSORS), own, names_of_other_stages=["b"]) == ""
    assert describe_mismatch(saved(**own), TENSORS, names_of_other_stages=["a"]) == "it lacks b"


def test_of_many_names_the_first_are_listed():
    many = {f"layer_{i}": torch.zeros(1) for i in range(8)}
    described = describe_mismatch({}, many)
    assert described == "it lacks layer_0, layer_1, layer_2, layer_3, layer_4 and 3 more"
