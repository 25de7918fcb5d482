"""Bad data and ranks that fail or exit are named, and no other rank hangs."""

import itertools
import os
import time
from pathlib import Path

import pytest
import tiny
import torch
from big_batch import big_batch
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import losses, recipe_class, run_recipe, run_recipe_keeping_warnings

from recipe_utils.settings.problems import ConfigError
from recipe_utils.training.log import read_metrics

TIMEOUT_SECONDS = 30
SLOW = pytest.mark.slow
PLANS = pytest.mark.parametrize("microbatching", [pytest.param("in_order", marks=SLOW), "packed"])
BAD_SAMPLES = [
    {"tokens": [], "labels": []},
    None,
    {"tokens": ["a", "b"], "labels": ["a", "b"]},
    {"tokens": [1, 2**70], "labels": [1, 2**70]},
    {"tokens": torch.ones(2, 2).long(), "labels": torch.ones(2, 2).long()},
    {"tokens": [True, False], "labels": [True, False]},
    {"tokens": [1.0, 2.0], "labels": [1.0, 2.0]},
]


# ---- Samples that cannot be trained on ------------------------------------------------------------


def run_on_samples(config, samples):
    with tiny.samples_of_the_test(samples):
        return run_recipe_keeping_warnings(config)


@PLANS
def test_a_bad_sample_on_one_rank_stops_all_ranks_before_the_step(microbatching, tiny_config, tmp_path):
    """Unshuffled, sample 9 belongs to rank 1 in update step 2."""
    config = tiny_config(dataset={"_component_": "tiny.samples_dataset"}, shuffle=False, microbatching=microbatching)
    samples = tiny.make_samples(32)
    samples[9] = BAD_SAMPLES[0]
    good, bad = run_distributed(
        run_on_samples, 2, config, samples, expect_failures=True, timeout_seconds=TIMEOUT_SECONDS
    )
    assert "sample 9 of dataset: it has no tokens" in bad
    assert "check_sample" in bad  # the background thread's traceback
    assert "rank(s) [1] could not prepare the next update step" in good
    # There are metrics of the update step before it, and no checkpoint and no model.
    assert os.listdir(tmp_path / "out") == ["logs"]
    assert [line["step"] for line in read_metrics(tmp_path / "out/logs/metrics.jsonl")] == [1]


@pytest.mark.parametrize(
    ("microbatching", "world_size", "num_workers"),
    [("packed", 2, 0), pytest.param("in_order", 1, 0, marks=SLOW), pytest.param("in_order", 2, 1, marks=SLOW)],
)
def test_skipping_bad_samples_trains_on_the_others_alone(microbatching, world_size, num_workers, tiny_config):
    """Not shuffled, all 8 samples of update step 2 are bad, and some of steps 1 and 3."""
    bad = [0, 3, *range(8, 16), 20]
    samples = tiny.make_samples(24)
    for index, sample in zip(bad, itertools.cycle(BAD_SAMPLES)):
        samples[index] = sample
    config = tiny_config(
        dataset={"_component_": "tiny.samples_dataset"},
        shuffle=False,
        batch_size=2,
        global_batch_size=8,
        gradient_accumulation_steps=...,
        microbatching=microbatching,
        num_workers=num_workers,
        on_bad_sample="skip",
    )
    results = run_distributed(run_on_samples, world_size, config, samples)
    good = [[samples[i] for i in range(first, first + 8) if i not in bad] for first in (0, 16)]
    logged = results[0][0]
    assert [metrics["num_tokens"] for metrics in logged] == [
        sum(label != tiny.IGNORE for sample in step for label in sample["labels"][1:]) for step in good
    ]
    loss, _ = big_batch(tiny.tiny_model(), good[0])
    assert logged[0]["loss"] == pytest.approx(loss, rel=1e-5)
    warnings = [text for _, texts in results for text in texts if "on_bad_sample=skip" in text]
    assert sorted(int(text.split()[1]) for text in warnings) == bad


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("num_steps", "error"),
    [
        (3, "on_bad_sample=skip: all 4 samples of each of the last 3 update steps were bad"),
        (2, "no update step of epoch 1 had target tokens: nothing was trained, and nothing is exported"),
    ],
)
def test_a_run_that_trains_nothing_ends_with_an_error_and_exports_nothing(num_steps, error, world_size, tiny_config):
    """Samples 12 to 31 are good, so the dataset is not refused before training."""
    samples = [{"tokens": [3, 900], "labels": [3, 3]}] * 12 + tiny.make_samples(20)
    dataset = {"_component_": "tiny.samples_dataset"}
    batch = {"global_batch_size": 4, "gradient_accumulation_steps": ..., "max_steps_per_epoch": num_steps}
    config = tiny_config(dataset=dataset, shuffle=False, on_bad_sample="skip", **batch)
    errors = run_distributed(run_on_samples, world_size, config, samples, expect_failures=True)
    assert all(f"SampleError: {error}" in text for text in errors)
    assert not list(Path(config["output_dir"]).glob("epoch_*"))


def test_update_steps_of_bad_samples_between_good_ones_do_not_end_a_run(tiny_config):
    bad = [{"tokens": [3, 900], "labels": [3, 3]}] * 8
    good = tiny.make_samples(8)
    config = tiny_config(dataset={"_component_": "tiny.samples_dataset"}, shuffle=False, on_bad_sample="skip")
    logged, _ = run_on_samples(config, [*bad, *good[:4], *bad, *good[4:]])
    assert [metrics["step"] for metrics in logged] == [1, 2]


NO_TARGETS = "none of its 8 samples can be trained on"
USELESS = {  # key of the data, what they are, and the error
    "masked": ("dataset", {"num_without_targets": 8}, NO_TARGETS),
    "one token": ("dataset_val", {"replace": {"tokens": [3], "labels": [3]}}, NO_TARGETS),
    "bad": ("dataset", {"replace": {"tokens": [3, 900], "labels": [3, 3]}}, "none of its .* token 900"),
}  # fmt: skip


@pytest.mark.parametrize("case", USELESS)
def test_data_that_nothing_can_be_trained_on_are_refused_before_training(case, tiny_config):
    key, changes, expected = USELESS[case]
    data = {"_component_": "tiny.tiny_dataset", "num_samples": 8}
    given = {"dataset": data, "dataset_val": data, "run_val_every_n_steps": 1}
    given[key] = {**data, **changes}
    if "replace" in changes:
        given[key]["replace"] = {str(i): changes["replace"] for i in range(8)}
    config = tiny_config(**given, on_bad_sample="skip")
    with pytest.raises(ConfigError, match=f"{key}: {expected}"):
        run_recipe(config)
    assert not list(Path(config["output_dir"]).glob("epoch_*"))


def run_with_data_of_the_rank(config):
    config["dataset"] = {**config["dataset"], "seed": int(os.environ["RANK"])}
    with pytest.raises(ConfigError) as error:
        run_recipe(config)
    return str(error.value)


def test_ranks_that_have_other_samples_are_named(tiny_config):
    for text in run_distributed(run_with_data_of_the_rank, 2, tiny_config()):
        assert "dataset: ranks 1 have other samples than rank 0" in text


def test_other_keys_of_packed_samples_are_ignored_with_one_warning(tiny_config):
    """``datasets.map`` leaves such keys in samples."""
    config = tiny_config(dataset={"_component_": "tiny.samples_dataset"}, microbatching="packed")
    samples = tiny.make_samples(24)
    expected, _ = run_on_samples(config, samples)
    more = [{**sample, "id": i, "prompt": "Why?"} for i, sample in enumerate(samples)]
    logged, warnings = run_on_samples(config, more)
    assert losses(logged) == losses(expected)
    (warning,) = [text for text in warnings if "is not read" in text]
    assert warning.startswith("dataset: id, prompt of samples is not read")


# ---- Ranks and workers that fail or leave ---------------------------------------------------------


@SLOW
@PLANS
def test_a_worker_that_is_killed_on_one_rank_changes_no_loss(microbatching, tiny_config, tmp_path):
    """Unshuffled, sample 9 belongs to rank 1 in update step 2."""
    data = {"_component_": "tiny.killing_dataset", "num_samples": 32, "index": 9}
    config = tiny_config(
        dataset={**data, "folder": str(tmp_path)}, shuffle=False, microbatching=microbatching, num_workers=1
    )
    undisturbed = {**config, "num_workers": 0}
    disturbed = run_distributed(run_recipe_keeping_warnings, 2, config)
    assert (tmp_path / "asked_for_9").exists()
    assert sum("ended by SIGKILL" in text for _, texts in disturbed for text in texts) == 1
    expected = run_distributed(run_recipe, 2, undisturbed)
    assert [losses(logged) for logged, _ in disturbed] == list(map(losses, expected))


def fail_inside_a_step(config, failing_rank, at_microbatch):
    """Makes rank ``failing_rank`` raise in its forward; returns the time each rank took to end."""
    import torch.distributed as dist

    cfg = OmegaConf.create(config)
    recipe = recipe_class()(cfg)
    recipe.setup(cfg)
    num_calls = 0
    sums = recipe.model.sums

    def failing_sums(microbatch):
        nonlocal num_calls
        num_calls += 1
        if dist.get_rank() == failing_rank and num_calls == at_microbatch:
            raise RuntimeError("lightning struck")
        return sums(microbatch)

    recipe.model.sums = failing_sums
    recipe.train()


@SLOW
def test_raising_inside_a_step_ends_all_ranks_within_the_timeout(tiny_config):
    config = tiny_config(
        dataset={"_component_": "tiny.tiny_dataset", "num_samples": 64},
        gradient_sync="last_microbatch",
        process_group_timeout_seconds=TIMEOUT_SECONDS,
    )
    started = time.monotonic()
    healthy, failing = run_distributed(
        fail_inside_a_step, 2, config, 1, 6, expect_failures=True, timeout_seconds=TIMEOUT_SECONDS
    )
    assert "lightning struck" in failing
    assert isinstance(healthy, str)
    assert time.monotonic() - started < 2 * TIMEOUT_SECONDS + 10
