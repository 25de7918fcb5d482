"""A budget that is found while training, and update steps that run out of memory, change no loss."""

import json
import shutil

import limited_loss
import live_meter
import pytest
import recipe_runs
import tiny
import yaml
from arrays import LAYOUTS
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from programs import tune
from recipe_runs import (
    DPO,
    KD,
    SFT,
    keep_messages,
    losses,
    run_recipe,
    run_recipe_recording_gradients,
    slow,
    tiny_config,
    writing_to,
)  # fmt: skip

from recipe_utils.memory.out_of_memory import RowsDoNotFitError
from recipe_utils.settings.problems import ConfigError

MAKE = {SFT: "tiny_config", DPO: "tiny_dpo_config", KD: "tiny_kd_config"}
TEXTS = {"dataset": {"_component_": "tiny.tiny_dataset", "num_samples": 320}}
PAIRS = {"dataset": {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 320}}
TREES = {"dataset": {"_component_": "tiny.tiny_tree_dataset", "num_samples": 320}}
HELD_OUT = {"dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 13, "seed": 5}}
VALIDATING = {**TEXTS, **HELD_OUT, "run_val_every_n_steps": 4}
PACKED = {
    "batch_size": 2, "gradient_accumulation_steps": ..., "global_batch_size": 16,
    "microbatching": "packed", "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},
}  # fmt: skip
KIB = 1024


def limited(most, **more):
    return {"loss": {"_component_": "limited_loss.LimitedLoss", "most": most, **more}}


def run_auto(config, recipe, *limits, total_bytes=1):
    """Returns metrics with a searched budget below ``limits`` [bytes] by rank, and this rank's highest peak."""
    with live_meter.pretended(*limits, total_bytes=total_bytes) as made:
        return run_recipe(config, recipe), max(made.peaks)


def run_auto_elsewhere(*args):
    return run_auto(*args, total_bytes=2)


ROWS = {  # recipe, layout, KiB that fit, changes
    "one": (SFT, "one", 600, VALIDATING),
    "2 ranks": (SFT, "fsdp-2", 600, VALIDATING),
    "4 ranks": (SFT, "hsdp-2x2", 600, TEXTS),
    "stages": (SFT, "pp-2", 700, {**TEXTS, "model": tiny.DEEP_MODEL}),
    "rows over ranks": (SFT, "fsdp-4", 600, {**TEXTS, "max_ranks_per_row": 2}),
    "least padding": (SFT, "fsdp-2", 600, {**TEXTS, "microbatching": "least_padding"}),
    "trees": (SFT, "one", 900, TREES),
    "out of memory": (SFT, "one", 600, {**TEXTS, **limited(50)}),
    "pairs": (DPO, "one", 800, PAIRS),
    "padded pairs": (DPO, "one", 1200, {**PAIRS, "microbatching": "least_padding"}),
    "distillation": (KD, "one", 7000, TEXTS),
}
FAST = ("2 ranks",)


@pytest.mark.parametrize("row", [row if row in FAST else slow(row) for row in ROWS])
def test_a_budget_that_is_found_gives_the_losses_of_a_fixed_one(row, weights_folder, tmp_path):
    """Each rank measures the true bytes of its live storages, and the limits differ."""
    recipe, layout, num_kib, changes = ROWS[row]
    world_size, dims = LAYOUTS[layout]
    config = getattr(recipe_runs, MAKE[recipe])(weights_folder, **{**PACKED, **changes, **dims})
    fixed = {**config, "max_tokens_per_microbatch": 32}
    expected = run_distributed(run_recipe, world_size, fixed, recipe)[0]
    limits = [(num_kib + 60 * rank) * KIB for rank in range(world_size)]
    auto = {**config, "max_tokens_per_microbatch": "auto"}
    results = run_distributed(run_auto, world_size, auto, recipe, *limits)
    logged = results[0][0]
    assert losses(logged) == pytest.approx(losses(expected), rel=1e-6)
    validated, fixed = (
        [m["val_loss"] for m in each if "val_loss" in m] for each in (logged, expected)
    )
    assert validated == pytest.approx(fixed, rel=1e-6)
    budgets = [m["max_tokens_per_microbatch"] for m in logged if "loss" in m]
    assert budgets[0] == live_meter.FIRST_TOKENS < budgets[-1]
    for (_, peak), limit in zip(results, limits, strict=True):
        assert peak < limit * 0.95 / 0.92
    if row == "one":
        assert results[0][1] > 0.9 * limits[0]


@pytest.mark.slow
def test_a_resume_begins_with_the_budget_that_was_found(weights_folder, tmp_path):
    """Losses are bitwise equal once it has settled; before, and with another memory, up to rounding."""
    changes = {**TEXTS, "prefetch_update_steps": 0, "save_every_n_steps": 3, "global_batch_size": 8}
    changes |= {"keep_last_n_checkpoints": None, "max_tokens_per_microbatch": "auto"}
    config = tiny_config(weights_folder, **{**PACKED, **changes})
    config = writing_to(tmp_path / "whole", config)
    logged, _ = run_distributed(run_auto, 1, config, SFT, 300 * KIB)[0]
    states = {
        json.loads(path.read_text())["global_step"]: json.loads(path.read_text())["token_budget"]
        for path in tmp_path.glob("whole/step_*/state.json")
    }
    settled = [step for step, budget in sorted(states.items()) if budget["is_settled"]]
    for step, limit in ((settled[0], 300), (settled[0] - 6, 300), (settled[0], 1)):
        folder = tmp_path / f"from_{step}_{limit}"
        shutil.copytree(tmp_path / "whole" / f"step_{step}", folder / f"step_{step}")
        resumed = resuming_in(folder, config)
        other = limit == 1
        run = run_auto_elsewhere if other else run_auto
        found, _ = run_distributed(run, 1, resumed, SFT, 300 * KIB)[0]
        expected = [m for m in logged if m["step"] > step]
        if step == settled[0] and not other:
            assert losses(found) == losses(expected)
            budgets = {m["max_tokens_per_microbatch"] for m in found}
            assert budgets == {states[step]["tokens"]}
        else:
            assert losses(found) == pytest.approx(losses(expected), rel=1e-6)
        first = live_meter.FIRST_TOKENS if other else states[step]["tokens"]
        assert found[0]["max_tokens_per_microbatch"] == first


# ---- Out of memory ------------------------------------------------------------------------------

BOUND = {**PACKED, "dataset": {"_component_": "tiny.tiny_dataset", "num_samples": 64}}
BOUND |= {"max_tokens_per_microbatch": 100}


def test_one_rank_repeats_an_update_step_in_shorter_rows(weights_folder):
    """Gradients in float64 are those without the out-of-memory error, also after some microbatches."""
    config = tiny_config(weights_folder, **BOUND)
    (expected,) = run_distributed(run_recipe_recording_gradients, 1, config)
    for changes in (limited(60), limited(60, skip=3)):
        failing = {**config, **changes}
        gradients, num_failed, messages = run_distributed(run_failing, 1, failing)[0]
        assert num_failed > 0
        assert any("repeated with at most" in text for text in messages)
        assert difference(gradients, expected) < 1e-12


def run_failing(config):
    limited_loss.num_failed = 0
    with keep_messages() as messages:
        return run_recipe_recording_gradients(config), limited_loss.num_failed, messages


def difference(found, expected):
    """Returns the largest difference of gradients by parameter, relative to the parameter's norm."""
    return max(
        float((mine[name] - theirs[name]).norm() / theirs[name].norm())
        for mine, theirs in zip(found, expected, strict=True)
        for name in theirs
    )


def run_failing_without_reset(config):
    """Keeps gradients of the microbatches that ran before an out-of-memory error."""
    zero_grad, kept = tiny.RecordingSGD.zero_grad, []

    def keep_once(self, set_to_none=True):
        if limited_loss.num_failed == 0 or kept:
            zero_grad(self, set_to_none)
        else:
            kept.append(True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny.RecordingSGD, "zero_grad", keep_once)
        return run_failing(config)


def test_a_microbatch_that_counts_twice_is_noticed(weights_folder):
    config = tiny_config(weights_folder, **BOUND)
    (expected,) = run_distributed(run_recipe_recording_gradients, 1, config)
    failing = {**config, **limited(60, skip=1)}
    gradients, *_ = run_distributed(run_failing_without_reset, 1, failing)[0]
    assert difference(gradients, expected) > 1e-2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (limited(60) | {"dtype": "bf16", "weights_dtype": "fp32"}, "next start has rows of at most"),
        ({"optimizer": {"_component_": "limited_loss.FailingSGD", "lr": 0.1}, "epochs": 2}, "optimizer's step, so shorter rows do not help"),
        (limited(20) | {"max_tokens_per_microbatch": 24}, "a row is one sample there; set enable_"),
        (limited(20) | {"microbatching": "in_order", "max_tokens_per_microbatch": ...}, "set microbatching=packed"),
    ],
)  # fmt: skip
def test_an_update_step_that_cannot_be_repeated_ends_with_what_to_set(
    changes, text, weights_folder, tmp_path
):
    """It fails in FSDP2's backward, in the optimizer's step, for one long sample, or with ``in_order``."""
    config = writing_to(tmp_path, tiny_config(weights_folder, **{**BOUND, **changes}))
    with pytest.raises(RowsDoNotFitError, match="rank 0 ran out of memory in update step") as error:
        run_recipe(config)
    assert text in str(error.value)
    if "one sample" in text:
        again = {**config, "resume_from_checkpoint": "auto"}
        with pytest.raises(
            ConfigError, match="max_tokens_per_microbatch: rank 0 ran out of memory"
        ):
            run_recipe(again)
        # Another config may fit; a new training deletes the record.
        assert len(run_recipe({**again, **limited(1000)})) > 1
        run_recipe({**config, **limited(1000)})
        assert not (tmp_path / "out_of_memory.json").exists()


@pytest.mark.slow
def test_a_launcher_starts_ranks_again_with_shorter_rows_until_they_fit(weights_folder, tmp_path):
    """Rank 1 of 2 fails above 50 positions: rows of up to 100, 85, 72, 61, 52 and 44 tokens."""
    changes = {**BOUND, "save_every_n_steps": 1, "resume_from_checkpoint": "auto"}
    config = tiny_config(weights_folder, **{**changes, "metric_logger": ...})
    whole = run_distributed(
        run_recipe, 2, writing_to(tmp_path / "whole", tiny_config(weights_folder, **BOUND))
    )
    config = writing_to(tmp_path / "out", {**config, **limited(50, rank=1, skip=2)})
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    found = tune(
        "run", "--nproc_per_node=2", "--max-restarts=9", SFT, "--config", "my.yaml", cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert "rank 1 ran out of memory in update step" in found.stderr
    assert "the launcher starts again from step_" in found.stderr
    record = json.loads((tmp_path / "out/out_of_memory.json").read_text())
    assert record["rank"] == 1
    assert record["tokens"] > 50
    metrics = map(json.loads, (tmp_path / "out/logs/metrics.jsonl").read_text().splitlines())
    curve = {line["step"]: line["loss"] for line in metrics if "loss" in line}
    assert [*curve.values()] == pytest.approx(losses(whole[0]), rel=1e-6)
