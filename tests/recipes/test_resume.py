"""A training that was stopped within an epoch resumes as if it had not been: one row per way to train."""

import shutil
from pathlib import Path

import pytest
import recipe_runs
import tiny
import torch
from arrays import LAYOUTS
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from recipe_runs import (  # fmt: skip
    DPO,
    KD,
    POLICY,
    SFT,
    STEP_OF_8,
    cosine,
    exported_model,
    run_recipe,
    slow,
    writing_to,
)

MAKE = {SFT: "tiny_config", DPO: "tiny_dpo_config", KD: "tiny_kd_config", POLICY: "tiny_config"}
IN_ORDER = {"in order": (2, {"microbatching": "in_order", "batch_size": 1})}
SAMPLES = {"dataset": {"_component_": "tiny.tiny_dataset", "num_samples": 38}}
PAIRS = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 38, "kind": "alike_beginnings"}
HELD_OUT = {"dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 13, "seed": 5}}
DISTILLED = {
    **SAMPLES,
    **HELD_OUT,
    "run_val_every_n_steps": 2,
    "model": tiny.DEEP_MODEL,
    "teacher_sizes": tiny.TEACHER_MODEL,
    "kd_loss": {"_component_": "recipe_utils.distillation.LinearDistillationLoss", "temperature": 2.0},
}
STAGES = {**SAMPLES, "model": tiny.DEEP_MODEL, "microbatching": "in_order", "batch_size": 1}
ADAPTED = {**SAMPLES, "clip_grad_norm": 0.05}
DROPS = tiny.adapted(tiny.DEEP_MODEL, lora_dropout=0.3)
QLORA = tiny.adapted(tiny.WIDE_MODEL, quantize_base=True)
SPLIT = {
    "_component_": "recipe_utils.optim.Split",
    "matrices": {"_component_": "torch.optim.RMSprop", "lr": 0.02},
    "rest": {"_component_": "torch.optim.AdamW", "lr": 0.01},
}
ROLLOUTS = {
    "dataset": {"_component_": "policies.graded_groups", "num_groups": 38},
    "loss": {"_component_": "recipe_utils.policy.PolicyLoss", "old": "start", "kl_weight": 0.1},
}
ROWS = {  # recipe, config, and layouts: the first saves and resumes bitwise, others have its curve
    "packed": (SFT, SAMPLES, ["fsdp-2", "one", "fsdp-4", "hsdp-2x2", "in order"]),
    "stages": (SFT, {**STAGES, "enable_async_checkpointing": True}, ["pp-2", "pp-4", "one"]),
    "dora": (SFT, {**ADAPTED, "model": tiny.adapted(tiny.WIDE_MODEL, use_dora=True)}, ["one", "pp-2"]),
    "dropout": (SFT, {**SAMPLES, "model": DROPS, "ac_mode": "selective", "ac_option": 1}, ["fsdp-2"]),
    "split": (SFT, {**SAMPLES, "model": tiny.DEEP_MODEL, "optimizer": SPLIT}, ["one", "fsdp-2", "pp-2"]),
    "qlora": (SFT, {**ADAPTED, "model": QLORA}, ["one", "pp-2"]),
    "wider weights": (SFT, {**SAMPLES, "dtype": "bf16", "weights_dtype": "fp32"}, ["fsdp-2"]),
    "live reference": (DPO, {"dataset": PAIRS, "sft_loss_weight": 0.2}, ["fsdp-2"]),
    "cached reference": (DPO, {"dataset": PAIRS, "sft_loss_weight": 0.2, "reference": "cached"}, ["pp-2"]),
    "start of a round": (POLICY, ROLLOUTS, ["fsdp-2", "one", "in order"]),
    "start of a round, adapters": (POLICY, {**ROLLOUTS, "model": tiny.adapted(tiny.DEEP_MODEL)}, ["one"]),
    "live teacher": (KD, DISTILLED, ["fsdp-2"]),
    "teacher in stages": (KD, DISTILLED, ["pp-2"]),
}  # fmt: skip
FAST = ("cached reference", "dropout", "start of a round")


def figures(logged, is_same_layout=True):
    """Returns all metrics but times and those of a run's start, or those that no layout changes."""
    return [
        (metrics["step"], name, value)
        for metrics in logged
        for name, value in metrics.items()
        if name in ("loss", "val_loss") or (is_same_layout and "second" not in name)
    ]


@pytest.mark.parametrize("row", [row if row in FAST else slow(row) for row in ROWS])
def test_it_goes_on_with_the_same_metrics_and_weights(row, weights_folder, tmp_path):
    recipe, changes, layouts = ROWS[row]
    common = {**STEP_OF_8, "lr_scheduler": cosine(2), "microbatching": "packed"}
    saving = {"save_every_n_steps": 3, "keep_last_n_checkpoints": 9}
    config = getattr(recipe_runs, MAKE[recipe])(weights_folder, **{**common, **saving, **changes})
    config = writing_to(tmp_path / "whole", config)
    world_size, dims = LAYOUTS[layouts[0]]
    logged = run_distributed(run_recipe, world_size, {**config, **dims}, recipe)[0]
    assert [metrics["step"] for metrics in logged if "loss" in metrics] == [1, 2, 3, 4, 5]
    for layout in layouts:
        is_same_layout = layout == layouts[0]
        shutil.copytree(tmp_path / "whole" / "step_3", tmp_path / layout / "step_3")
        world_size, dims = {**LAYOUTS, **IN_ORDER}[layout]
        resumed = {**resuming_in(tmp_path / layout, config), **dims}
        found = figures(run_distributed(run_recipe, world_size, resumed, recipe)[0], is_same_layout)
        expected = [each for each in figures(logged, is_same_layout) if each[0] > 3]
        if is_same_layout:
            assert found == expected
            files = exported_model(config), exported_model(resumed)
            weights, theirs = (torch.load(file, weights_only=True) for file in files)
            assert all(torch.equal(weights[name], theirs[name]) for name in weights | theirs)
        assert [each[:2] for each in found] == [each[:2] for each in expected], layout
        assert [v for *_, v in found] == pytest.approx([v for *_, v in expected], rel=1e-5), layout
        assert Path(resumed["output_dir"], "step_5").is_dir()
