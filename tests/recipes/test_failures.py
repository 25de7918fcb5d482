"""A rank that fails or leaves does not let the others hang."""

import time

import pytest
import tiny
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import recipe_class, run_recipe, run_recipe_keeping_warnings

TIMEOUT_SECONDS = 15


SLOW = pytest.mark.slow
PLANS = pytest.mark.parametrize("microbatching", [pytest.param("in_order", marks=SLOW), "packed"])


@PLANS
def test_a_bad_sample_on_one_rank_stops_all_ranks_before_the_step(microbatching, tiny_config):
    """Unshuffled, sample 9 belongs to rank 1 in update step 2."""
    config = tiny_config(
        dataset={
            "_component_": "tiny.tiny_dataset",
            "num_samples": 32,
            "replace": {"9": {"tokens": [], "labels": []}},
        },
        shuffle=False,
        microbatching=microbatching,
    )
    good, bad = run_distributed(
        run_recipe, 2, config, expect_failures=True, timeout_seconds=TIMEOUT_SECONDS
    )
    assert "sample 9 of dataset: it has no tokens" in bad
    assert "check_sample" in bad  # the background thread's traceback
    assert "rank(s) [1] could not prepare the next update step" in good


@pytest.mark.parametrize(
    ("microbatching", "world_size", "num_workers"),
    [
        ("packed", 2, 0),
        pytest.param("in_order", 1, 0, marks=SLOW),
        pytest.param("in_order", 2, 1, marks=SLOW),
    ],
)
def test_skipping_bad_samples_trains_on_the_others_alone(
    microbatching, world_size, num_workers, tiny_config
):
    """Unshuffled; update step 2 of 8 samples has nothing but bad ones, step 1 and 3 have some."""
    bad = [0, 3, *range(8, 16), 20]
    replace = {str(index): {"tokens": [], "labels": []} for index in bad}
    config = tiny_config(
        dataset={"_component_": "tiny.tiny_dataset", "num_samples": 24, "replace": replace},
        shuffle=False,
        batch_size=2,
        global_batch_size=8,
        gradient_accumulation_steps=...,
        microbatching=microbatching,
        num_workers=num_workers,
        on_bad_sample="skip",
    )
    results = run_distributed(run_recipe_keeping_warnings, world_size, config)
    samples = tiny.make_samples(24)
    good = [i for i in range(24) if i not in bad]
    expected = [
        sum(label != tiny.IGNORE for i in step for label in samples[i]["labels"][1:])
        for step in ([i for i in good if i < 8], [i for i in good if i >= 16])
    ]
    logged = results[0][0]
    assert [metrics["num_tokens"] for metrics in logged] == expected
    loss, _ = tiny.big_batch_gradients(tiny.tiny_model(), [samples[i] for i in good if i < 8])
    assert logged[0]["loss"] == pytest.approx(loss, rel=1e-5)
    warnings = [text for _, texts in results for text in texts if "on_bad_sample=skip" in text]
    assert sorted(int(text.split()[1]) for text in warnings) == bad


@SLOW
@PLANS
def test_a_worker_that_is_killed_on_one_rank_changes_no_loss(microbatching, tiny_config, tmp_path):
    """Unshuffled, sample 9 belongs to rank 1 in update step 2."""
    data = {"_component_": "tiny.killing_dataset", "num_samples": 32, "index": 9}
    config = tiny_config(
        dataset={**data, "folder": str(tmp_path)},
        shuffle=False,
        microbatching=microbatching,
        num_workers=1,
    )
    undisturbed = {**config, "num_workers": 0}
    disturbed = run_distributed(run_recipe_keeping_warnings, 2, config)
    assert (tmp_path / "asked_for_9").exists()
    assert sum("ended by SIGKILL" in text for _, texts in disturbed for text in texts) == 1
    for (losses, _), expected in zip(
        disturbed, run_distributed(run_recipe, 2, undisturbed), strict=True
    ):
        assert [metrics["loss"] for metrics in losses] == [metrics["loss"] for metrics in expected]


def fail_inside_a_step(config, failing_rank, at_microbatch):
    """Rank ``failing_rank`` raises in its forward; returns how long each rank took to end."""
    import torch.distributed as dist

    cfg = OmegaConf.create(config)
    recipe = recipe_class()(cfg)
    recipe.setup(cfg)
    num_calls = 0
    sums = recipe.sums

    def failing_sums(microbatch):
        nonlocal num_calls
        num_calls += 1
        if dist.get_rank() == failing_rank and num_calls == at_microbatch:
            raise RuntimeError("lightning struck")
        return sums(microbatch)

    recipe.sums = failing_sums
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
        fail_inside_a_step,
        2,
        config,
        1,
        6,
        expect_failures=True,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    assert "lightning struck" in failing
    assert isinstance(healthy, str)
    assert time.monotonic() - started < 2 * TIMEOUT_SECONDS + 10


def leave_early(config):
    """Takes two update steps of an epoch of many, then leaves the ``with`` block."""
    import threading

    cfg = OmegaConf.create(config)
    recipe = recipe_class()(cfg)
    recipe.setup(cfg)
    with recipe.loader.epoch(0) as steps:
        for step in steps:
            if step.index == 1:
                break
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


@SLOW
@PLANS
def test_leaving_the_update_steps_early_leaves_no_thread_and_hangs_no_rank(
    microbatching, tiny_config
):
    data = {"_component_": "tiny.tiny_dataset", "num_samples": 400}
    config = tiny_config(dataset=data, microbatching=microbatching)
    assert run_distributed(leave_early, 2, config, timeout_seconds=30) == [[], []]
