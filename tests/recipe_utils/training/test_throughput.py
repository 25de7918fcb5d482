"""Rates of data are counts over the window's seconds and all ranks, by the host's clock; learning rates are by group."""

import time

import pytest

from recipe_utils.training.log import TEXT
from recipe_utils.training.metrics import Throughput, learning_rates
from recipe_utils.update_steps.step import UpdateStep


@pytest.fixture
def clock(monkeypatch):
    seconds = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    return seconds


def update_step(**totals):
    return UpdateStep(0, (), totals, dp_degree=2)


@pytest.mark.parametrize("end_window", [Throughput.read_and_restart, Throughput.restart])
@pytest.mark.parametrize("world_size", [1, 4])
def test_figures_are_those_of_all_update_steps_of_the_window(world_size, end_window, clock):
    throughput = Throughput(world_size)
    throughput.add(update_step(target_tokens=1000, real_tokens=1, positions=9), 0.5)
    clock[0] += 7.0
    end_window(throughput)
    throughput.add(update_step(target_tokens=100, real_tokens=300, positions=400, images=8), 0.5)
    throughput.add(update_step(target_tokens=40, real_tokens=60, positions=80, images=4), 0.25)
    clock[0] += 2.0
    assert throughput.read_and_restart({**TEXT.rates, "images": "images"}) == {
        "data_wait_seconds": 0.375,
        "tokens_per_second_per_gpu": 140 / 2 / world_size,
        "real_tokens_per_second_per_gpu": 360 / 2 / world_size,
        "images_per_second_per_gpu": 12 / 2 / world_size,
        "padding_fraction": pytest.approx((480 - 360) / 480),
    }


ONE, NAMED, UNNAMED = (
    [{"lr": 0.1}],
    [{"lr": 0.1, "name": "body"}, {"lr": 0.1, "name": "head"}],
    [{"lr": 0.1}, {"lr": 0.2}],
)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (ONE, {"lr": 0.1}),
        (ONE * 2, {"lr": 0.1}),
        (NAMED, {"lr": 0.1, "lr/body": 0.1, "lr/head": 0.1}),
        (UNNAMED, {"lr": 0.1, "lr/0": 0.1, "lr/1": 0.2}),
    ],
)
def test_rates_are_logged_by_group_where_groups_have_names_or_differ(groups, expected):
    assert learning_rates(groups) == expected


def test_figures_are_those_of_what_is_counted_and_finite():
    throughput = Throughput(world_size=1)
    assert throughput.read_and_restart() == {"data_wait_seconds": 0}
    throughput.add(update_step(pairs=3), 0.5)
    assert throughput.read_and_restart() == {"data_wait_seconds": 0.5}
    throughput.add(update_step(target_tokens=0, real_tokens=0, positions=0), 0.5)
    figures = throughput.read_and_restart()
    assert figures["tokens_per_second_per_gpu"] == 0
    assert figures["padding_fraction"] == 1
