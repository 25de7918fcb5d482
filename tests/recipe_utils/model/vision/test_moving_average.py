"""The moving average of weights: its values, in place, on all ranks, without skipped steps."""

import pytest
import torch
from distributed_runs import run_distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.model.vision.average_teacher import update_average
from recipe_utils.optim.nonfinite import NonfiniteGuard
from recipe_utils.optim.optimizer import OptimizerSettings


def model(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)
    made[2].to(torch.float32)  # two precisions
    return made


def weights_of(module):
    return {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
        for name, p in parameters_by_name(module).items()
    }


def expected(average, followed, momentum):
    return {name: momentum * average[name] + (1 - momentum) * followed[name] for name in average}


def assert_close(found, wanted):
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, msg=name)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("grad_norm", [None, torch.tensor(2.0).double()])
def test_momentum_is_the_weight_of_the_average(grad_norm, momentum):
    average, followed = model(0), model(1)
    wanted = expected(weights_of(average), weights_of(followed), momentum)
    of_followed = weights_of(followed)
    places = [p.data_ptr() for p in average.parameters()]
    update_average(average, followed, momentum, grad_norm)
    assert_close(weights_of(average), wanted)
    assert_close(weights_of(followed), of_followed)
    assert places == [p.data_ptr() for p in average.parameters()]
    if momentum == 0:
        assert all(map(torch.equal, average.parameters(), followed.parameters()))


def test_a_step_that_a_fused_optimizer_skips_does_not_change_the_average():
    average, followed = model(0, torch.float32), model(1, torch.float32)
    optimizer = torch.optim.AdamW(followed.parameters(), lr=0.1, fused=True)
    settings = OptimizerSettings({}, on_nonfinite="skip")
    guard = NonfiniteGuard(optimizer, torch.device("cpu"), settings)
    before = weights_of(average), weights_of(followed)
    for value in (float("nan"), float("inf"), 1.0):
        for parameter in followed.parameters():
            parameter.grad = torch.full_like(parameter, value)
        grad_norm = torch.tensor(value)
        assert guard.should_step(grad_norm)  # skipped on the device
        optimizer.step()
        update_average(average, followed, 0.5, grad_norm)
        for each, of in zip((average, followed), before, strict=True):
            is_equal = [torch.equal(weight, of[n]) for n, weight in weights_of(each).items()]
            assert all(is_equal) == (value != 1.0)


def sharded(momentum, dims):
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])
    average, followed = model(0), model(1)
    for made in (average, followed):
        for module in made:
            fully_shard(module, mesh=mesh)
        fully_shard(made, mesh=mesh)
    # After a forward without a backward the root's parameters are the gathered weights.
    with torch.no_grad():
        for made in (average, followed):
            made[0](torch.zeros(2, 5).double())
    update_average(average, followed, momentum, torch.tensor(1.0))
    first = weights_of(average)
    update_average(average, followed, momentum, torch.tensor(float("inf")))
    return first, weights_of(average)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(2,), (1, 2)], ids=["fsdp", "hsdp"])
def test_shards_are_averaged_alike(dims):
    wanted = expected(weights_of(model(0)), weights_of(model(1)), 0.7)
    for first, second in run_distributed(sharded, 2, 0.7, dims):
        assert_close(first, wanted)
        assert all(torch.equal(weight, first[name]) for name, weight in second.items())


def test_a_stage_without_weights_moves_nothing():
    update_average(nn.Identity(), nn.Identity(), 0.5, torch.tensor(1.0))
