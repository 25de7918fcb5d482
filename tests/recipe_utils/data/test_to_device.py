"""Microbatches reach the device in order, one ahead, and are let go once consumed."""

import gc
import weakref

import pytest
import tiny
import torch

from recipe_utils.data.collate import collate_packed_microbatch
from recipe_utils.data.count import StepCounts
from recipe_utils.data.loader import UpdateStep
from recipe_utils.data.to_device import copy_ahead

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    ),
]


def update_step(num_microbatches):
    samples = tiny.make_samples(num_microbatches)
    microbatches = [collate_packed_microbatch([sample], tiny.IGNORE) for sample in samples]
    if torch.cuda.is_available():
        microbatches = [microbatch.pin_memory() for microbatch in microbatches]
    return samples, UpdateStep(0, microbatches, StepCounts(1, 1, 1, num_microbatches), 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_microbatches", [0, 1, 2, 5])
def test_every_microbatch_arrives_in_order_and_the_last_is_known(num_microbatches, device):
    samples, step = update_step(num_microbatches)
    got = list(copy_ahead(step, torch.device(device)))
    assert [m.inputs["tokens"][0].tolist() for m, _ in got] == [s["tokens"] for s in samples]
    assert [is_last for _, is_last in got] == [i == num_microbatches - 1 for i in range(len(got))]
    assert all(m.targets.labels.device.type == device for m, _ in got)


def test_one_is_taken_from_the_step_ahead_of_the_one_that_computes():
    _, step = update_step(4)
    taken = []

    def watched():
        for item in step:
            taken.append(item)
            yield item

    for number, _ in enumerate(copy_ahead(watched(), torch.device("cpu")), start=1):
        assert len(taken) == min(number + 1, 4)


@pytest.mark.parametrize("device", DEVICES)
def test_no_more_than_two_microbatches_are_held(device):
    _, step = update_step(5)
    refs = []
    for microbatch, _ in copy_ahead(step, torch.device(device)):
        refs.append(weakref.ref(microbatch.inputs["tokens"]))
        gc.collect()
        assert sum(ref() is not None for ref in refs) == 1
    del microbatch
