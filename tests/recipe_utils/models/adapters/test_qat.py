"""Fake-quantized training has the gradients of torchao's own layers."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from torchao.quantization.qat import Int8DynActInt4WeightQATQuantizer

from recipe_utils.losses.attach import attach_loss
from recipe_utils.losses.cross_entropy import LinearCrossEntropyLoss
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.weights import load_weights
from recipe_utils.update_steps.step import Targets

QUANTIZER = {"_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer", "groupsize": 16}
TOKENS = torch.arange(1, 41).reshape(2, 20)


def gradients(loss, model):
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("sizes", [tiny.MODEL, tiny.UNTIED_MODEL], ids=["tied", "untied"])
def test_all_weights_are_trained_as_by_torchao(sizes):
    """An untied output layer is quantized, too, also if the loss projects with its weight."""
    plain = tiny.tiny_model(sizes)
    model = tiny.on_meta(sizes, quantizer=QUANTIZER)
    load_weights(model, {"model": plain.state_dict()}, ModelSettings(), torch.device("cpu"))
    attach_loss(model, LinearCrossEntropyLoss())
    found = gradients(model(TOKENS, targets=Targets(TOKENS + 1, torch.arange(TOKENS.numel()))).squeeze(), model)

    expected, exact = (
        gradients(F.cross_entropy(each(TOKENS).flatten(0, 1), TOKENS.flatten() + 1, reduction="sum"), each)
        for each in (Int8DynActInt4WeightQATQuantizer(groupsize=16).prepare(tiny.tiny_model(sizes)), plain)
    )  # fmt: skip
    assert found.keys() == expected.keys() == exact.keys()
    for name, gradient in expected.items():
        size = gradient.norm()
        assert (found[name] - gradient).norm() <= 1e-5 * size, name
        assert (exact[name] - gradient).norm() > 1e-3 * size, name
