"""The share of weights that updates reach is counted honestly, and said where bf16 keeps it small."""

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from recipe_runs import RECORDING_SGD, keep_messages, run_recipe
from torch import nn

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.optim.moved import NUM_SAMPLED, NUM_STEPS, WeightsMoved
from recipe_utils.optim.optimizer import OptimizerInBackward
from recipe_utils.parallel.ranks import RankSettings, join_ranks

CPU = torch.device("cpu")
KEY = "weights_moved_fraction"


@pytest.fixture(autouse=True)
def ranks():
    ranks = join_ranks(RankSettings(device="cpu"))
    yield ranks
    ranks.leave()


def step_of(index, epoch_length=1000):
    return UpdateStep(index, (), {}, 1, is_last_of_epoch=index == epoch_length - 1)


def read(moved, step):
    """What the device has found, once it has."""
    found = {name: late.read() for name, late in moved.read(step).items()}
    return {name: value for name, value in found.items() if value is not None}


def train(parameter, optimizer, moved, num_steps, epoch_length=1000, gradient=1.0, rates=None):
    """What is read after each step; ``gradient`` broadcasts to the parameter."""
    found = []
    for i in range(num_steps):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[i]
        parameter.grad = torch.zeros_like(parameter) + torch.as_tensor(gradient).to(parameter.dtype)
        optimizer.step()
        found.append(read(moved, step_of(i % epoch_length, epoch_length)).get(KEY))
    return found


def make(weights, lr=1e-3, **options):
    parameter = nn.Parameter(weights)
    optimizer = torch.optim.SGD([parameter], lr=lr, **options)
    return parameter, optimizer, WeightsMoved(optimizer, CPU)


def test_it_is_the_share_of_elements_that_twenty_steps_have_changed():
    weights = torch.tensor([1.0, 2.0, 0.01, 0.0]).bfloat16()  # 1e-3 is lost beside the first two
    found = train(*make(weights), num_steps=30)
    assert found == [None] * (NUM_STEPS - 1) + [0.5] + [None] * 10


def test_it_is_read_once_an_epoch_and_at_the_end_of_a_short_one():
    weights = torch.ones(4)
    found = train(*make(weights), num_steps=60, epoch_length=30)
    assert [i for i, value in enumerate(found) if value is not None] == [19, 49]
    found = train(*make(weights), num_steps=9, epoch_length=3)
    assert found == [None, None, 1.0] * 3


def test_metrics_that_are_logged_seldom_have_it_when_they_are():
    parameter, optimizer, moved = make(torch.ones(4))
    found = {}
    for i in range(60):
        parameter.grad = torch.ones(4)
        optimizer.step()
        if i % 25 == 24:
            found |= {i: read(moved, step_of(i))}
    assert found == {24: {KEY: 1.0}, 49: {}}


def test_elements_without_a_gradient_are_not_counted():
    """Such as the rows of embeddings whose tokens do not occur."""
    weights = torch.full((4, 3), 0.01).bfloat16()
    gradient = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    with keep_messages() as messages:
        found = train(*make(weights), num_steps=20, gradient=gradient)
    assert found[-1] == 1
    assert not messages


def test_the_probe_waits_for_the_end_of_a_warm_up():
    rates = [0.0, 1e-6, 2e-6, 3e-6, *[1e-3] * 40]
    found = train(*make(torch.ones(4).bfloat16() * 0.01), num_steps=44, rates=rates)
    assert [i for i, value in enumerate(found) if value is not None] == [24]
    assert found[24] == 1
    rates = [1e-9 * i for i in range(44)]
    with keep_messages() as messages:
        found = train(*make(torch.ones(4).bfloat16()), num_steps=44, epoch_length=22, rates=rates)
    assert found == [None] * 44
    assert not messages


def test_without_a_learning_rate_nothing_is_said():
    with keep_messages() as messages:
        assert train(*make(torch.ones(4).bfloat16(), lr=0.0), num_steps=30) == [None] * 30
    assert not messages


def test_less_than_half_of_bf16_s_weights_is_said_once_and_what_to_set():
    with keep_messages() as messages:
        found = train(*make(torch.ones(8).bfloat16()), num_steps=60, epoch_length=30)
    assert [value for value in found if value is not None] == [0, 0]
    (message,) = messages
    assert message.startswith("dtype=bf16: 0% of the trained weights have changed in 20 update")
    assert "lr=0.001" in message
    assert message.endswith("set weights_dtype=fp32")


def test_of_fp32_s_weights_it_is_only_logged():
    with keep_messages() as messages:
        assert train(*make(torch.ones(8), lr=1e-12), num_steps=20)[-1] == 0
    assert not messages


def test_steps_that_were_left_out_are_no_steps():
    """A fused optimizer is told of them on the device; others are not called."""
    parameter = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = torch.optim.SGD([parameter], lr=1e-3, fused=True)
    moved = WeightsMoved(optimizer, CPU)
    optimizer.found_inf = torch.ones(())
    with keep_messages() as messages:
        assert train(parameter, optimizer, moved, num_steps=20) == [None] * 20
    assert not messages
    _, other, moved = make(torch.ones(4))
    assert read(moved, step_of(0, epoch_length=1)) == {}
    assert other.param_groups[0]["lr"] == 1e-3


def test_gradients_that_are_not_finite_are_not_counted():
    gradient = torch.tensor([float("nan"), float("inf"), 1.0, 1.0])
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0]).bfloat16()
    parameter, optimizer, moved = make(weights)
    train(parameter, optimizer, moved, num_steps=1, gradient=gradient)
    assert train(parameter, optimizer, moved, num_steps=19)[-1] is None  # of another epoch: index 0
    parameter, optimizer, moved = make(weights.clone())
    found = []
    for i in range(20):
        parameter.grad = gradient.to(torch.bfloat16)
        optimizer.step()
        found.append(read(moved, step_of(i)))
    assert found[-1] == {KEY: 0.5}


def test_of_many_weights_a_sample_is_kept_over_all_of_them():
    """A third of the rows are 1, which does not move."""
    rows = torch.tensor([0.01, 1.0, 0.01]).repeat(1000)[:, None]
    weights = (rows * torch.ones(1, 512)).bfloat16()
    parameter, optimizer, moved = make(weights)
    assert weights.numel() > 20 * NUM_SAMPLED
    train(parameter, optimizer, moved, num_steps=1)
    ((part,),) = [probe._parts for probe in moved._probes]
    assert NUM_SAMPLED / 2 < part.weights.numel() <= NUM_SAMPLED
    assert part.weights.untyped_storage().nbytes() == part.weights.nbytes  # no view of all weights
    for i in range(1, NUM_STEPS):
        optimizer.step()
        found = read(moved, step_of(i))
    assert found[KEY] == pytest.approx(2 / 3, abs=0.01)


def test_an_optimizer_in_the_backward_is_watched_too():
    model = nn.ParameterList([nn.Parameter(torch.full((4,), w).bfloat16()) for w in (1.0, 0.01)])
    moved = WeightsMoved(
        OptimizerInBackward(model, lambda parameters: torch.optim.SGD(parameters, lr=1e-3)), CPU
    )
    found = []
    for i in range(20):
        sum(parameter.sum() for parameter in model).backward()
        found.append(read(moved, step_of(i)).get(KEY))
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


def test_a_recipe_that_does_not_train_says_nothing(tiny_config):
    config = tiny_config(dtype="bf16", optimizer=RECORDING_SGD, model=tiny.UNTIED_MODEL)
    assert run_distributed(moved_and_said, 1, [config]) == [[([], [])]]
