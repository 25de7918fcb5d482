"""Non-finite gradients never reach the weights; they are counted, and end the training if configured."""

import pytest
import tiny
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recipe_utils.optim.nonfinite import NonfiniteGuard
from recipe_utils.optim.optimizer import OptimizerInBackward, OptimizerSettings

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def make_guard(on_nonfinite="stop", max_steps=10, fused=False):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    settings = OptimizerSettings(optimizer={}, on_nonfinite=on_nonfinite, max_nonfinite_steps=max_steps)
    return NonfiniteGuard(optimizer, CPU, settings), optimizer, parameter


def see(guard, norms):
    return [bool(guard.should_step(torch.tensor(norm))) for norm in norms]


def read(guard, global_step):
    """Reads the counts as a log line does; returns them and the warning."""
    counts, num_steps = guard.take_counts()
    *judged, num_own = counts.tolist()
    assert num_own == 0
    return (*judged, num_steps), guard.judge(*judged, num_steps, global_step)


@pytest.mark.parametrize("norm", [NAN, INF, -INF])
def test_a_fused_optimizer_skips_the_step_itself(norm):
    guard, optimizer, parameter = make_guard(fused=True)
    for value, moves in ((1.0, True), (norm, False), (2.0, True)):
        before = parameter.detach().clone()
        parameter.grad = torch.full((2,), value)
        # Not a tensor, whose truth value would wait for the device.
        assert guard.should_step(torch.tensor(value)) is True
        optimizer.step()
        assert torch.equal(parameter, before) is not moves
    assert optimizer.state[parameter]["step"].item() == 2
    assert read(guard, 3)[0] == (1, 1, 3)


@pytest.mark.parametrize("of_host", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_recipe_skips_are_counted_by_themselves_and_end_nothing(fused, of_host):
    guard, optimizer, parameter = make_guard(fused=fused)
    for value, moves in ((1.0, True), (9.0, False), (NAN, False), (9.0, False), (2.0, True)):
        before, norm = parameter.detach().clone(), torch.tensor(value)
        parameter.grad = torch.full((2,), value)
        condition = norm < 5
        if guard.should_step(norm, also=bool(condition) if of_host else condition):
            optimizer.step()
        assert torch.equal(parameter, before) is not moves
    counts, num_steps = guard.take_counts()
    assert (counts.tolist(), num_steps) == ([1, 1, 2], 5)
    assert guard.take_counts()[0].tolist() == [0, 0, 0]
    guard.should_step(torch.tensor(9.0), also=False)
    guard.check(6)
    assert guard.problem == ""


def test_a_fused_optimizer_does_not_wait_for_the_condition():
    with FakeTensorMode():  # its tensors have no values to wait for
        guard, *_ = make_guard(fused=True)
        norm = torch.ones(())
        assert guard.should_step(norm, also=norm < 5) is True
        guard.take_counts()


def test_an_optimizer_that_has_stepped_in_the_backward_is_not_guarded():
    optimizer = OptimizerInBackward(tiny.tiny_model(), torch.optim.SGD)
    guard = NonfiniteGuard(optimizer, CPU, OptimizerSettings(optimizer={}))
    assert guard.should_step(None) is True
    with pytest.raises(ValueError, match="optimizer_in_bwd=True: the backward has updated the weights"):
        guard.should_step(None, also=False)
    assert read(guard, 1) == ((0, 0, 0), "")
    assert guard.problem == ""


def test_skipped_steps_are_counted_from_one_reading_to_the_next():
    guard, *_ = make_guard("skip")
    assert see(guard, [1e30, NAN, 0.0, INF]) == [True, False, True, False]
    counts, warning = read(guard, 4)
    assert counts == (2, 1, 4)
    assert warning.startswith("2 of the last 4 update steps up to 4 had a loss or gradient")
    assert warning.endswith("(on_nonfinite=skip)")
    see(guard, [1.0, 1.0])
    assert read(guard, 6) == ((0, 1, 2), "")  # the last of before counts on
    assert guard.problem == ""


@pytest.mark.parametrize("fused", [False, True])
def test_stop_stops_at_the_first_once_it_is_read(fused):
    guard, *_ = make_guard("stop", fused=fused)
    see(guard, [1.0, 1.0])
    assert read(guard, 2) == ((0, 0, 2), "")
    see(guard, [1.0, NAN, 1.0])
    assert guard.problem == ""
    guard.check(5)
    assert guard.problem.startswith("1 of the last 3 update steps up to 5")
    assert "on_nonfinite=stop: 1 in a row" in guard.problem
    see(guard, [NAN])
    assert read(guard, 6) == ((2, 1, 4), "")
    assert "up to 5" in guard.problem  # the first reason stays


@pytest.mark.parametrize(
    ("windows", "stops"),
    [
        ([[NAN] * 3], False),
        ([[NAN] * 4 + [1.0] * 4], True),
        ([[NAN, 1.0] * 4], False),
        ([[NAN] * 2, [NAN] * 2], True),
        ([[NAN] * 2, [1.0], [NAN] * 2], False),
        ([[NAN] * 2 + [1.0], [NAN] * 3], False),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_skip_stops_at_more_in_a_row_than_allowed(windows, stops, fused):
    guard, *_ = make_guard("skip", max_steps=3, fused=fused)
    for i, norms in enumerate(windows):
        see(guard, norms)
        read(guard, i)
    assert ("on_nonfinite=skip: 4 in a row, max_nonfinite_steps=3" in guard.problem) is stops
    assert bool(guard.problem) is stops
