"""Trees of tensors reach the device in order, one ahead, and are let go once consumed."""

import weakref

import pytest
import tiny
import torch

from recipe_utils.data.loader.microbatch import mark_last
from recipe_utils.data.loader.to_device import to_device_ahead
from recipe_utils.data.text.collate import collate_packed_microbatch

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    ),
]


def make_microbatches(num_microbatches):
    samples = tiny.make_samples(num_microbatches)
    microbatches = [collate_packed_microbatch([sample], tiny.IGNORE) for sample in samples]
    if torch.cuda.is_available():
        microbatches = [microbatch.pin_memory() for microbatch in microbatches]
    return samples, microbatches


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_microbatches", [0, 1, 2, 5])
def test_every_microbatch_arrives_in_order_and_the_last_is_known(num_microbatches, device):
    samples, microbatches = make_microbatches(num_microbatches)
    got = list(to_device_ahead(mark_last(microbatches), torch.device(device)))
    assert [m.inputs["tokens"][0].tolist() for m, _ in got] == [s["tokens"] for s in samples]
    assert [is_last for _, is_last in got] == [i == num_microbatches - 1 for i in range(len(got))]
    assert all(m.targets.labels.device.type == device for m, _ in got)
    for (arrived, _), sent in zip(got, microbatches, strict=True):
        assert arrived.counts == sent.counts
        assert arrived.inputs["document_lengths"] == sent.inputs["document_lengths"]


@pytest.mark.parametrize("device", DEVICES)
def test_trees_keep_their_shape_and_what_is_not_a_tensor(device):
    _, (microbatch,) = make_microbatches(1)
    microbatch = microbatch.with_teacher({"log_probs": [torch.ones(3)]})
    trees = [
        (i, {"hidden": torch.full((2, i), i), "rest": [None, "text", 0.5]}, microbatch)
        for i in range(3)
    ]
    got = list(to_device_ahead(trees, torch.device(device)))
    for (index, arrived, with_teacher), (i, sent, _) in zip(got, trees, strict=True):
        assert index == i
        assert arrived["hidden"].device.type == device
        assert torch.equal(arrived["hidden"].cpu(), sent["hidden"])
        assert arrived["rest"] == sent["rest"]
        assert with_teacher.targets.teacher["log_probs"][0].device.type == device
        assert with_teacher.targets.teacher["log_probs"][0].tolist() == [1, 1, 1]


def test_one_is_taken_from_the_step_ahead_of_the_one_that_computes():
    _, microbatches = make_microbatches(4)
    taken = []

    def watched():
        for item in microbatches:
            taken.append(item)
            yield item

    ahead = to_device_ahead(watched(), torch.device("cpu"))
    for number, _ in enumerate(ahead, start=1):
        assert len(taken) == min(number + 1, 4)


def microbatches_of_nobody(num_microbatches, refs):
    """Microbatches that nothing but who iterates over them holds; ``refs`` gets one to each."""
    for i in range(num_microbatches):
        sample = {"tokens": list(range(1, i + 3)), "labels": list(range(1, i + 3))}
        microbatch = collate_packed_microbatch([sample], tiny.IGNORE)
        if torch.cuda.is_available():
            microbatch = microbatch.pin_memory()
        refs.append(weakref.ref(microbatch.inputs["tokens"]))
        yield microbatch
        del microbatch


def num_alive(refs):
    return sum(ref() is not None for ref in refs)  # no cycle keeps them alive, so without gc


@pytest.mark.parametrize("device", DEVICES)
def test_at_most_two_microbatches_are_held(device):
    sent, arrived = [], []
    marked = mark_last(microbatches_of_nobody(8, sent))
    for microbatch, _ in to_device_ahead(marked, torch.device(device)):
        assert num_alive(arrived) == 0
        arrived.append(weakref.ref(microbatch.inputs["tokens"]))
        arrived.append(weakref.ref(microbatch.targets.labels))
        assert num_alive(sent) <= 3  # one computes, one is copied, one is held by mark_last
    del microbatch
    assert len(arrived) == 16
    assert num_alive(arrived) == 0
