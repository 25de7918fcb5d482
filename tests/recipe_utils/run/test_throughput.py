"""Rates are those of target and real tokens over the window's seconds and all ranks."""

import time

import pytest

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.data.loader.to_host import Late
from recipe_utils.run.throughput import Throughput

STEPS = [((100, 300, 400), 0.5), ((40, 60, 80), 0.25)]


def update_step(target_tokens, real_tokens, slots):
    totals = {"target_tokens": target_tokens, "real_tokens": real_tokens, "positions": slots}
    return UpdateStep(0, (), totals, dp_degree=2)


def read_and_restart(throughput):
    return {
        name: value.read() if isinstance(value, Late) else value
        for name, value in throughput.read_and_restart().items()
    }


def add_steps(throughput):
    for totals, wait_seconds in STEPS:
        throughput.add(update_step(*totals), wait_seconds)


@pytest.mark.parametrize("world_size", [1, 4])
def test_rates_are_tokens_over_seconds_and_ranks(world_size):
    before = time.perf_counter()
    throughput = Throughput(world_size)
    after_start = time.perf_counter()
    add_steps(throughput)
    time.sleep(0.05)
    before_read = time.perf_counter()
    figures = read_and_restart(throughput)
    longest, shortest = time.perf_counter() - before, before_read - after_start
    for key, num_tokens in (
        ("tokens_per_second_per_gpu", 140),
        ("real_tokens_per_second_per_gpu", 360),
    ):
        rate = num_tokens / world_size
        assert rate / longest <= figures[key] <= rate / shortest


def test_padding_is_a_fraction_of_all_slots_and_waiting_a_mean_per_update_step():
    throughput = Throughput(world_size=2)
    add_steps(throughput)
    figures = read_and_restart(throughput)
    assert figures["padding_fraction"] == pytest.approx((480 - 360) / 480)
    assert figures["data_wait_seconds"] == pytest.approx((0.5 + 0.25) / 2)


@pytest.mark.parametrize("end_window", [read_and_restart, Throughput.restart])
def test_a_window_holds_nothing_of_the_one_before(end_window):
    throughput = Throughput(world_size=1)
    add_steps(throughput)
    time.sleep(0.05)
    end_window(throughput)
    ended = time.perf_counter()
    throughput.add(update_step(10, 10, 10), 0.0)
    time.sleep(0.001)
    read = time.perf_counter()
    figures = read_and_restart(throughput)
    assert figures["padding_fraction"] == 0
    assert figures["data_wait_seconds"] == 0
    assert figures["tokens_per_second_per_gpu"] <= 10 / (read - ended)
    assert figures["tokens_per_second_per_gpu"] > 10 / 0.05 / 10


def test_a_window_ends_when_its_rates_are_read_and_the_next_begins_there():
    """A device comes later than the host to the end of an update step."""
    throughput = Throughput(world_size=1)
    throughput.add(update_step(10, 10, 10), 0.0)
    first = throughput.read_and_restart()
    throughput.add(update_step(10, 10, 10), 0.0)
    second = throughput.read_and_restart()
    time.sleep(0.1)
    rates = [first[name].read() for name in ("tokens_per_second_per_gpu",) * 2]
    assert rates[0] == rates[1] < 10 / 0.1
    assert first["real_tokens_per_second_per_gpu"].read() == rates[0]
    assert second["tokens_per_second_per_gpu"].read() > 2 * rates[0]


def test_figures_are_those_of_what_is_counted_and_finite():
    throughput = Throughput(world_size=1)
    assert read_and_restart(throughput) == {"data_wait_seconds": 0}
    throughput.add(UpdateStep(0, (), {"pairs": 3}, dp_degree=1), 0.5)
    assert read_and_restart(throughput) == {"data_wait_seconds": 0.5}
    throughput.add(
        UpdateStep(0, (), {"target_tokens": 0, "real_tokens": 0, "positions": 0}, 1), 0.5
    )
    figures = read_and_restart(throughput)
    assert figures["tokens_per_second_per_gpu"] == 0
    assert figures["padding_fraction"] == 1


@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (2, 2)])
def test_images_are_counted_once_however_many_ranks_and_microbatches(pp, dp, monkeypatch):
    """By a clock that goes 4 seconds an update step: 3 microbatches of 2 images on each data-parallel rank."""
    seconds = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    throughput = Throughput(world_size=pp * dp)
    totals = {"images": 3 * 2 * dp, "crop_tokens": 3 * 2 * dp * 50}  # summed over dp ranks already
    for _ in range(2):
        throughput.add(UpdateStep(0, (), totals, dp_degree=dp), 0.25)
        seconds[0] += 4.0
    figures = read_and_restart(throughput)
    assert figures == {
        "data_wait_seconds": 0.25,
        "images_per_second_per_gpu": 2 * 6 * dp / 8 / (pp * dp),
        "crop_tokens_per_second_per_gpu": 2 * 300 * dp / 8 / (pp * dp),
    }
