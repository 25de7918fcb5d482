"""The fraction of weights that update steps change, and the warning if bf16 keeps it small."""

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from recipe_runs import RECORDING_SGD, keep_messages, run_recipe
from torch import nn

from recipe_utils.optim.moved import NUM_SAMPLED, NUM_STEPS, ChangedWeights
from recipe_utils.optim.optimizer import OptimizerInBackward
from recipe_utils.parallel.ranks import RankSettings, join_ranks

KEY = "weights_moved_fraction"


@pytest.fixture(autouse=True)
def ranks():
    ranks = join_ranks(RankSettings(device="cpu"))
    yield ranks
    ranks.leave()


def make(weights, lr=1e-3, **options):
    parameter = nn.Parameter(weights)
    optimizer = torch.optim.SGD([parameter], lr=lr, **options)
    return parameter, optimizer, ChangedWeights(optimizer)


def train(
    parameter, optimizer, changed, num_steps, epoch_length=1000, gradient=1.0, rates=None, every=1
):
    """What is logged by step, every so many steps; ``gradient`` broadcasts to the parameter."""
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
    assert train(*make(weights), num_steps=30) == {NUM_STEPS: 0.5}


def test_it_is_logged_once_per_epoch_and_at_the_end_of_a_short_one():
    assert train(*make(torch.ones(4)), num_steps=60, epoch_length=30) == {20: 1, 50: 1}
    assert train(*make(torch.ones(4)), num_steps=9, epoch_length=3) == {3: 1, 6: 1, 9: 1}
    assert train(*make(torch.ones(4)), num_steps=60, every=25) == {25: 1}


def test_elements_without_a_finite_gradient_other_than_zero_are_not_counted():
    """Such as embeddings of tokens that do not occur."""
    weights = torch.full((4, 3), 0.01).bfloat16()
    gradient = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    with keep_messages() as messages:
        assert train(*make(weights), num_steps=20, gradient=gradient) == {20: 1}
    assert not messages
    gradient = torch.tensor([float("nan"), float("inf"), 1.0, 1.0])
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0]).bfloat16()
    assert train(*make(weights), num_steps=20, gradient=gradient) == {20: 0.5}


def test_a_warm_up_is_not_taken_for_rounding():
    rates = [0.0, 1e-6, 2e-6, 3e-6, *[1e-3] * 40]
    weights = torch.ones(4).bfloat16() * 0.01
    assert train(*make(weights), num_steps=44, rates=rates) == {40: 1}
    rates = [1e-9 * i for i in range(44)]
    with keep_messages() as messages:
        weights = torch.ones(4).bfloat16()
        assert train(*make(weights), num_steps=44, epoch_length=22, rates=rates) == {}
        assert train(*make(weights, lr=0.0), num_steps=30) == {}
    assert not messages


def test_less_than_half_of_bf16_weights_is_warned_of_once_and_fp32_never():
    with keep_messages() as messages:
        weights = torch.ones(8).bfloat16()
        assert train(*make(weights), num_steps=60, epoch_length=30) == {20: 0, 50: 0}
    (message,) = messages
    assert message.startswith("dtype=bf16: 0% of the trained weights have changed in 20 update")
    assert "lr=0.001" in message
    assert message.endswith("set weights_dtype=fp32")
    with keep_messages() as messages:
        assert train(*make(torch.ones(8), lr=1e-12), num_steps=20) == {20: 0}
    assert not messages


def test_a_step_that_the_device_skips_counts_nothing():
    parameter, optimizer, changed = make(torch.ones(4).bfloat16(), fused=True)
    optimizer.found_inf = torch.ones(())
    with keep_messages() as messages:
        assert train(parameter, optimizer, changed, num_steps=20) == {}
    assert not messages
    _, _, changed = make(torch.ones(4))
    assert changed.fraction(is_last_of_epoch=True) is None


def test_a_sample_of_many_weights_is_copied_from_all_of_them():
    """A third of the rows are 1, which does not change."""
    rows = torch.tensor([0.01, 1.0, 0.01]).repeat(1000)[:, None]
    weights = (rows * torch.ones(1, 512)).bfloat16()
    parameter, optimizer, changed = make(weights)
    assert weights.numel() > 20 * NUM_SAMPLED
    train(parameter, optimizer, changed, num_steps=1)
    ((before, _),) = changed._first.values()
    assert NUM_SAMPLED / 2 < before.numel() <= NUM_SAMPLED
    assert before.untyped_storage().nbytes() == before.nbytes  # no view of all weights
    for _ in range(1, NUM_STEPS):
        optimizer.step()
    assert changed.fraction(False) == pytest.approx(2 / 3, abs=0.01)


def test_an_optimizer_in_the_backward_is_watched_too():
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


def moved_and_said(configs):
    found = []
    for config in configs:
        with keep_messages() as messages:
            logged = run_recipe(config)
        values = [line[KEY] for line in logged if KEY in line]
        found.append(
            (values, [text for text in messages if "trained weights have changed" in text])
        )
    return found


LAYOUTS = {
    "one process": (1, {}),
    "fsdp": (2, {}),
    "stages": (2, {"pipeline_parallel_dim": 2}),
    "optimizer in the backward": (2, {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_updates_reach_fp32_weights_and_few_of_bf16_s(layout, tiny_config):
    world_size, dims = LAYOUTS[layout]
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 2e-5, "weight_decay": 0.0}
    in_bf16 = tiny_config(dtype="bf16", epochs=2, optimizer=optimizer, **dims)
    configs = [in_bf16, {**in_bf16, "weights_dtype": "fp32"}]
    (bf16, fp32), *others = run_distributed(moved_and_said, world_size, configs)
    assert len(bf16[0]) == len(fp32[0]) == 2  # once an epoch
    assert all(value < 0.4 for value in bf16[0])
    assert len(bf16[1]) == 1
    assert all(value > 0.99 for value in fp32[0])
    assert fp32[1] == []
    assert others in ([], [[([], []), ([], [])]])  # rank 0 speaks


@pytest.mark.slow
def test_a_recipe_that_does_not_train_says_nothing(tiny_config):
    config = tiny_config(dtype="bf16", optimizer=RECORDING_SGD, model=tiny.UNTIED_MODEL)
    assert run_distributed(moved_and_said, 1, [config]) == [[([], [])]]
