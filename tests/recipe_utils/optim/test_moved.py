"""The fraction of weights that update steps change, and the warning if bf16 keeps it small."""

import pytest
import torch
from distributed_runs import run_distributed
from recipe_runs import keep_messages, run_recipe
from torch import nn

from recipe_utils.optim.moved import NUM_SAMPLED, NUM_STEPS, ChangedWeights
from recipe_utils.optim.optimizer import OptimizerInBackward

KEY = "weights_moved_fraction"


pytestmark = pytest.mark.usefixtures("one_process")


def make(weights, lr=1e-3, **options):
    parameter = nn.Parameter(weights)
    optimizer = torch.optim.SGD([parameter], lr=lr, **options)
    return parameter, optimizer, ChangedWeights(optimizer)


def train(weights, num_steps, epoch_length=1000, gradient=1.0, rates=None, every=1, **options):
    """Returns the fractions by step, read every so many steps; ``gradient`` broadcasts."""
    parameter, optimizer, changed = make(weights, **options)
    found = {}
    for i in range(num_steps):
        if i % epoch_length == 0:
            changed.restart()
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[i]
        parameter.grad = torch.zeros_like(parameter) + torch.as_tensor(gradient).to(parameter.dtype)
        optimizer.step()
        if (i + 1) % every == 0:
            found[i + 1] = changed.fraction((i + 1) % epoch_length == 0)
    return {i: value for i, value in found.items() if value is not None}


def test_it_is_the_fraction_of_elements_that_twenty_steps_have_changed():
    weights = torch.tensor([1.0, 2.0, 0.01, 0.0]).bfloat16()  # 1e-3 is lost beside the first two
    assert train(weights, num_steps=30) == {NUM_STEPS: 0.5}


def test_it_is_logged_once_per_epoch_and_at_the_end_of_a_short_one():
    assert train(torch.ones(4), num_steps=60, epoch_length=30) == {20: 1, 50: 1}
    assert train(torch.ones(4), num_steps=9, epoch_length=3) == {3: 1, 6: 1, 9: 1}
    assert train(torch.ones(4), num_steps=60, every=25) == {25: 1}


def test_elements_without_a_finite_gradient_other_than_zero_are_not_counted():
    """An example is embeddings of tokens that do not occur."""
    weights = torch.full((4, 3), 0.01).bfloat16()
    gradient = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    with keep_messages() as messages:
        assert train(weights, num_steps=20, gradient=gradient) == {20: 1}
    assert not messages
    gradient = torch.tensor([float("nan"), float("inf"), 1.0, 1.0])
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0]).bfloat16()
    assert train(weights, num_steps=20, gradient=gradient) == {20: 0.5}


def test_a_warm_up_is_not_taken_for_rounding():
    rates = [0.0, 1e-6, 2e-6, 3e-6, *[1e-3] * 40]
    assert train(torch.full((4,), 0.01).bfloat16(), num_steps=44, rates=rates) == {40: 1}
    rates = [1e-9 * i for i in range(44)]
    ones = torch.ones(4).bfloat16()
    with keep_messages() as messages:
        assert train(ones, num_steps=44, epoch_length=22, rates=rates) == {}
        assert train(ones, num_steps=30, lr=0.0) == {}
    assert not messages


def test_the_warning_is_logged_once_and_for_bf16_only():
    with keep_messages() as messages:
        weights = torch.ones(8).bfloat16()
        assert train(weights, num_steps=60, epoch_length=30) == {20: 0, 50: 0}
        assert train(torch.ones(8), num_steps=20, lr=1e-12) == {20: 0}
    (message,) = messages
    assert message.startswith("dtype=bf16: 0% of the trained weights have changed in 20 update")
    assert "lr=0.001" in message
    assert message.endswith("set weights_dtype=fp32")


def test_steps_that_the_device_skips_are_not_counted():
    parameter, optimizer, changed = make(torch.ones(4).bfloat16(), fused=True)
    assert changed.fraction(is_last_of_epoch=True) is None
    optimizer.found_inf = torch.ones(())
    parameter.grad = torch.ones_like(parameter)
    for _ in range(20):
        optimizer.step()
    assert changed.fraction(is_last_of_epoch=True) is None


def test_a_sample_of_many_weights_is_copied_from_all_of_them():
    """A third of the rows are 1 and do not change."""
    rows = torch.tensor([0.01, 1.0, 0.01]).repeat(1000)[:, None]
    weights = (rows * torch.ones(1, 512)).bfloat16()
    assert weights.numel() > 20 * NUM_SAMPLED
    parameter, optimizer, changed = make(weights)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ((before, _),) = changed._first.values()
    assert NUM_SAMPLED / 2 < before.numel() <= NUM_SAMPLED
    assert before.untyped_storage().nbytes() == before.nbytes  # no view of all weights
    for _ in range(1, NUM_STEPS):
        optimizer.step()
    assert changed.fraction(False) == pytest.approx(2 / 3, abs=0.01)


def test_an_optimizer_in_the_backward_is_measured():
    model = nn.ParameterList([nn.Parameter(torch.full((4,), w).bfloat16()) for w in (1.0, 0.01)])
    changed = ChangedWeights(
        OptimizerInBackward(model, lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    )
    found = []
    for _ in range(20):
        sum(parameter.sum() for parameter in model).backward()
        found.append(changed.fraction(False))
    assert found == [None] * 19 + [0.5]


# ---- In a recipe ------------------------------------------------------------------------------------


def fractions_and_warnings(configs):
    found = []
    for config in configs:
        with keep_messages() as messages:
            logged = run_recipe(config)
        warnings = [text for text in messages if "trained weights have changed" in text]
        found.append(([line[KEY] for line in logged if KEY in line], warnings))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dims", [{}, {"pipeline_parallel_dim": 2}], ids=["fsdp", "stages"])
def test_small_updates_reach_fp32_weights_and_few_bf16_weights(dims, tiny_config):
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 2e-5, "weight_decay": 0.0}
    in_bf16 = tiny_config(dtype="bf16", epochs=2, optimizer=optimizer, **dims)
    configs = [in_bf16, {**in_bf16, "weights_dtype": "fp32"}]
    (bf16, fp32), other = run_distributed(fractions_and_warnings, 2, configs)
    assert len(bf16[0]) == len(fp32[0]) == 2  # once per epoch
    assert all(value < 0.4 for value in bf16[0])
    assert len(bf16[1]) == 1
    assert all(value > 0.99 for value in fp32[0])
    assert fp32[1] == []
    assert other == [([], []), ([], [])]  # only rank 0 logs
