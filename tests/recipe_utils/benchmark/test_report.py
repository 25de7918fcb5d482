from dataclasses import replace

import pytest

from recipe_utils.benchmark import report
from recipe_utils.benchmark.report import TimedStep, quartiles, summarize

STEP = TimedStep(
    round=1,
    step=2,
    baseline="stock",
    seconds=2.0,
    num_target_tokens=100,
    num_real_tokens=200,
    num_positions=400,
    fingerprint=7,
    expected_fingerprint=7,
    peak_memory_bytes=1000,
)
STEPS = [
    STEP,
    replace(STEP, baseline="fast", seconds=1.0, num_positions=250, peak_memory_bytes=500),
    replace(STEP, step=3, seconds=3.0, num_target_tokens=300),
    replace(STEP, step=3, baseline="fast", seconds=1.0, num_target_tokens=300, num_positions=250),
]
LOSSES = {"stock": [[9.0, 8.0, 4.0]], "fast": [[9.0, 8.0, 4.002]]}


def test_quartiles_are_interpolated_between_the_values():
    assert quartiles([4, 1, 3, 2, 5]) == (2, 3, 4)
    assert quartiles([1, 2]) == (1.25, 1.5, 1.75)
    assert quartiles([3]) == (3, 3, 3)


def test_ratios_are_paired_by_update_step_padding_is_of_all_and_memory_of_a_round():
    stock, fast = summarize(STEPS, LOSSES, "stock")
    assert stock.ratio == (1, 1, 1)
    assert fast.ratio.median == 2.5  # 2 in step 2, 3 in step 3
    assert fast.target_tokens_per_second.median == 200
    assert stock.padding_fraction == 0.5
    assert fast.padding_fraction == pytest.approx(0.2)
    assert fast.positions_per_target == 500 / 400
    assert summarize(STEPS[:2], LOSSES, "stock")[1].memory_ratio == 0.5


def test_the_share_of_a_product_is_that_of_flops_per_second():
    stock, fast = summarize([replace(STEPS[0], num_flops=300), *STEPS[1:]], LOSSES, "stock", (), 1000.0)
    assert (stock.share_of_product, fast.share_of_product) == (0.15, None)
    table = report.throughput_table([stock, fast], "stock", {})
    assert [row.split("|")[7].strip() for row in table.splitlines()[2:]] == ["15%", ""]


def test_losses_of_another_model_are_not_compared():
    stock, fast = summarize(STEPS, LOSSES, "stock", ["fast"])
    assert fast.loss_deviation is None
    assert fast.ratio.median == 2.5
    assert "| another model |" in report.throughput_table([stock, fast], "stock", {})


def test_losses_are_compared_only_where_the_samples_are_the_same():
    fast = summarize(STEPS, LOSSES, "stock")[1]
    assert fast.has_same_samples
    assert fast.loss_deviation == pytest.approx(5e-4)
    other = [replace(each, fingerprint=8) if each.baseline == "fast" else each for each in STEPS]
    summaries = summarize(other, LOSSES, "stock")
    assert summaries[1].loss_deviation is None
    assert "than the reference: fast;" in report.samples_sentence(other, summaries)
    assert "other samples" in report.throughput_table(summaries, "stock", {})


def test_a_nan_loss_is_no_small_deviation():
    deviation = summarize(STEPS, {"stock": [[9.0, 8.0]], "fast": [[float("nan"), 8.0]]}, "stock")[1].loss_deviation
    assert deviation != deviation


def test_samples_other_than_the_data_order_s_are_reported():
    steps = [replace(each, expected_fingerprint=1) for each in STEPS]
    assert "fast, stock" in report.samples_sentence(steps, summarize(steps, LOSSES, "stock"))


def test_tables_name_baselines_without_figures():
    table = report.throughput_table(summarize(STEPS, LOSSES, "stock"), "stock", {"limit": "skipped: one process only"})
    assert "| fast | **200** (150-250) | **2.50** (2.25-2.75) |" in table
    assert "| limit | skipped: one process only |" in table
