"""Trees of tensors reach the device in order, one ahead, and are freed after use."""

import weakref

import pytest
import tiny
import torch

from recipe_utils.parallel.to_device import pinned, to_device_ahead
from recipe_utils.update_steps.step import mark_last

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def microbatches_of(samples, refs=None):
    """Microbatches that only the caller holds; ``refs`` gets a weak reference to each."""
    for sample in samples:
        microbatch = tiny.packed_row([sample])
        if torch.cuda.is_available():
            microbatch = pinned(microbatch)
        if refs is not None:
            refs.append(weakref.ref(microbatch.inputs["tokens"]))
        yield microbatch
        del microbatch


@on_devices
@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_every_microbatch_arrives_in_order_and_the_last_is_marked(number, device):
    samples = tiny.make_samples(number)
    sent = list(microbatches_of(samples))
    arrived = list(to_device_ahead(mark_last(sent), torch.device(device)))
    assert [m.inputs["tokens"][0].tolist() for m, _ in arrived] == [s["tokens"] for s in samples]
    assert [is_last for _, is_last in arrived] == [i == number - 1 for i in range(number)]
    for (microbatch, _), of_sent in zip(arrived, sent, strict=True):
        assert microbatch.targets.labels.device.type == device
        assert microbatch.counts == of_sent.counts
        assert microbatch.inputs["document_lengths"] == of_sent.inputs["document_lengths"]


@on_devices
def test_trees_keep_their_structure_and_other_leaves(device):
    (microbatch,) = microbatches_of(tiny.make_samples(1))
    microbatch = microbatch.with_outputs(log_probs=[torch.ones(3)])
    tree = (7, {"hidden": torch.full((2, 3), 5), "rest": [None, "text", 0.5]}, microbatch)
    ((number, rest, with_outputs),) = to_device_ahead([tree], torch.device(device))
    assert (number, rest["rest"]) == (7, tree[1]["rest"])
    assert rest["hidden"].device.type == device
    assert torch.equal(rest["hidden"].cpu(), tree[1]["hidden"])
    (log_probs,) = with_outputs.targets.outputs["log_probs"]
    assert (log_probs.device.type, log_probs.tolist()) == (device, [1, 1, 1])


def num_alive(refs):
    return sum(ref() is not None for ref in refs)  # without gc, because they are in no cycle


@on_devices
def test_one_is_copied_ahead_and_at_most_two_are_held(device):
    sent, arrived = [], []
    samples = [{"tokens": list(range(1, n)), "labels": list(range(1, n))} for n in range(3, 11)]
    marked = mark_last(microbatches_of(samples, sent))
    for number, (microbatch, _) in enumerate(to_device_ahead(marked, torch.device(device)), 1):
        assert num_alive(arrived) == 0
        arrived += [weakref.ref(microbatch.inputs["tokens"]), weakref.ref(microbatch.targets.labels)]
        assert len(sent) == min(number + 2, 8)  # mark_last takes one more
        assert num_alive(sent) <= 3
    del microbatch
    assert len(arrived) == 16
    assert num_alive(arrived) == 0


@needs_cuda
def test_a_copy_is_pinned_with_the_outputs_of_a_teacher():
    microbatch = tiny.packed_row(tiny.make_samples(3))
    copy = pinned(microbatch.with_outputs(teacher=[torch.ones(2)]))
    targets = copy.targets
    tensors = (copy.inputs["tokens"], targets.labels, targets.positions, targets.outputs["teacher"][0])
    assert all(tensor.is_pinned() for tensor in tensors)
    assert not microbatch.inputs["tokens"].is_pinned()
    assert copy.inputs["document_lengths"] == microbatch.inputs["document_lengths"]
    assert copy.counts == microbatch.counts
