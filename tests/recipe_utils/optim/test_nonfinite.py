"""What is not finite never reaches the weights; it is counted, and ends the training when asked to."""

import pytest
import tiny
import torch
from recipe_runs import keep_messages
from torch import nn

from recipe_utils.optim.nonfinite import NonfiniteGuard
from recipe_utils.optim.optimizer import OptimizerInBackward

CPU = torch.device("cpu")
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


def make_guard(on_nonfinite="stop", max_in_a_row=10, fused=False):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    guard = NonfiniteGuard(optimizer, CPU, on_nonfinite, max_in_a_row)
    return guard, optimizer, parameter


def see(guard, norms):
    return [bool(guard.admits(torch.tensor(norm))) for norm in norms]


@pytest.mark.parametrize("norm", NOT_FINITE)
def test_a_norm_that_is_not_finite_is_not_admitted_and_a_finite_one_is(norm):
    guard, *_ = make_guard()
    assert see(guard, [1.0, norm, 0.0, 1e30]) == [True, False, True, True]


@pytest.mark.parametrize("norm", NOT_FINITE)
def test_a_fused_optimizer_is_always_let_go_on_and_leaves_the_step_out_itself(norm):
    guard, optimizer, parameter = make_guard(fused=True)
    for value, moves in ((1.0, True), (norm, False), (2.0, True)):
        before = parameter.detach().clone()
        parameter.grad = torch.full((2,), value)
        # Not a tensor: whoever asks for its truth does not wait for the device.
        assert guard.admits(torch.tensor(value)) is True
        optimizer.step()
        assert torch.equal(parameter, before) is not moves
    assert optimizer.state[parameter]["step"].item() == 2
    assert guard.read_and_restart(3).read() == 1


def test_an_optimizer_that_has_stepped_in_the_backward_is_not_looked_at():
    model = tiny.tiny_model()
    optimizer = OptimizerInBackward(model, torch.optim.SGD)
    guard = NonfiniteGuard(optimizer, CPU)
    assert guard.admits(None) is True
    assert guard.read_and_restart(1).read() == 0
    assert not guard.should_stop
    assert guard.description == ""


def test_those_left_out_are_counted_from_one_reading_to_the_next():
    guard, *_ = make_guard("skip")
    see(guard, [1.0, float("nan"), 1.0, float("inf")])
    assert guard.read_and_restart(4).read() == 2
    assert guard.description.startswith(
        "2 of the last 4 update steps up to 4 had a loss or gradient"
    )
    assert guard.description.endswith("(on_nonfinite=skip)")
    see(guard, [1.0, 1.0])
    assert guard.read_and_restart(6).read() == 0
    assert guard.description == ""


def test_nothing_is_counted_where_nothing_was_seen():
    guard, *_ = make_guard()
    assert guard.read_and_restart(0).read() == 0
    assert not guard.should_stop


@pytest.mark.parametrize("fused", [False, True])
def test_stop_stops_at_the_first(fused):
    guard, *_ = make_guard("stop", fused=fused)
    see(guard, [1.0, 1.0])
    guard.read_and_restart(2).read()
    assert not guard.should_stop
    see(guard, [1.0, float("nan"), 1.0])
    assert not guard.should_stop  # until it is read
    assert guard.look(3)
    guard.read_and_restart(5).read()
    assert guard.should_stop
    assert "on_nonfinite=stop: 1 in a row" in guard.description


@pytest.mark.parametrize(
    ("windows", "stops"),
    [
        ([[float("nan")] * 3], False),
        ([[float("nan")] * 4], True),
        ([[float("nan")] * 4 + [1.0] * 4], True),
        ([[float("nan"), 1.0] * 4], False),
        ([[float("nan")] * 2, [float("nan")] * 2], True),
        ([[float("nan")] * 2, [1.0], [float("nan")] * 2], False),
        ([[float("nan")] * 2 + [1.0], [float("nan")] * 3], False),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_skip_stops_at_more_in_a_row_than_it_may_leave_out(windows, stops, fused):
    guard, *_ = make_guard("skip", max_in_a_row=3, fused=fused)
    num_seen = 0
    for norms in windows:
        see(guard, norms)
        num_seen += len(norms)
        guard.read_and_restart(num_seen).read()
    assert guard.should_stop is stops
    if stops:
        assert "on_nonfinite=skip: 4 in a row, max_nonfinite_steps=3" in guard.description


def test_what_is_not_read_yet_is_known_to_those_who_wait():
    """The host may be an update step ahead of the device."""
    guard, *_ = make_guard()
    see(guard, [float("nan")])
    first = guard.read_and_restart(1)
    see(guard, [1.0])
    second = guard.read_and_restart(2)
    assert not guard.look(2, waits=False)
    assert guard.look(2)
    assert (first.read(), second.read()) == (1, 0)


def test_why_it_stops_stays_said_whatever_is_read_after():
    guard, *_ = make_guard()
    see(guard, [float("nan")])
    first = guard.read_and_restart(1)
    see(guard, [1.0])
    second = guard.read_and_restart(2)
    first.read()
    assert guard.look(2, waits=False)
    assert (first.read(), second.read()) == (1, 0)
    assert guard.should_stop
    assert guard.description.startswith("1 of the last 1 update steps up to 1 had a loss")


def test_what_is_left_out_is_said_once_when_it_is_read():
    guard, *_ = make_guard("skip")
    see(guard, [float("nan")])
    left_out = guard.read_and_restart(1)
    with keep_messages() as messages:
        assert not guard.look(1, waits=False)
        assert messages == []
        assert left_out.read() == left_out.read() == 1
        assert not guard.look(1)
    (message,) = messages
    assert message.startswith("1 of the last 1 update steps up to 1 had a loss")
