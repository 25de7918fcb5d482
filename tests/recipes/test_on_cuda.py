"""Tests of the recipe that need a GPU; on a CPU the same code runs without the device's part."""

import json
import shutil
import traceback
import warnings
from itertools import islice

import pytest
import torch
from live_meter import LiveMeter
from omegaconf import OmegaConf

from recipe_utils.benchmark.baselines.update_step import make_recipe
from recipe_utils.cli.registry import config_path
from recipe_utils.data.meter import METERS

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])]
BATCH = {"batch_size": 2, "gradient_accumulation_steps": 2}


def random_recipe(stage, name, changes):
    """Returns the fine-tuning recipe with random weights and samples, and its config; ``stage``: device and folder."""
    device, folder = stage
    sizes = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64, "intermediate_dim": 128}
    model = {"_component_": "torchtune.models.llama3_2.llama3_2", "vocab_size": 512, "max_seq_len": 256, **sizes}
    cfg = OmegaConf.load(config_path("llama3_2/1B_full_update_step"))
    cfg.pop("checkpoint_dir", None)
    keys = {
        "model": {**model, "rope_base": 500_000, "scale_factor": 1},
        "tokenizer": {"_component_": "types.SimpleNamespace", "pad_id": 0, "max_seq_len": 32},
        "dataset": {"_component_": "recipe_utils.benchmark.random_texts.random_texts", "median": 90},
        "checkpointer": {"_component_": "recipe_utils.check_gradient.RandomWeights", "model": "${model}", "seed": 0},
        "output_dir": str(folder / name),
        "device": device,
        "num_workers": 0,
        "save_every_n_minutes": None,
        **changes,
    }
    keys["dataset"] |= {"vocab_size": 512, "num_samples": 64}
    for key, value in keys.items():
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    return make_recipe("full_finetune_update_step", cfg), cfg


def trained_losses(stage, name, **keys):
    recipe, cfg = random_recipe(stage, name, {"dtype": "fp32", "weights_dtype": None, **BATCH, **keys})
    with recipe.run:
        recipe.setup(cfg)
        recipe.train()
    lines = (stage[1] / name / "logs" / "metrics.jsonl").read_text().splitlines()
    return [metrics["loss"] for metrics in map(json.loads, lines) if "loss" in metrics]


def test_a_warm_update_step_never_waits_for_the_device(device, tmp_path):
    recipe, cfg = random_recipe((device, tmp_path), "waits", BATCH)
    waits = []

    def keep(message, *_, **__):
        if "called a synchronizing CUDA operation" in str(message):  # not that the mode is a prototype
            waits.append("".join(traceback.format_stack(limit=8)))

    with recipe.run:
        recipe.setup(cfg)
        with recipe.loader.epoch(0) as steps, warnings.catch_warnings():
            update_steps = iter(steps)
            for step in islice(update_steps, 3):
                recipe.update(step)
            step = next(update_steps)
            warnings.simplefilter("always")
            warnings.showwarning = keep
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("warn")
            try:
                recipe.update(step)
                assert not waits, waits[0]
                torch.zeros((), device=device).item()  # a wait, which must be counted
                assert len(waits) == (device == "cuda")
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")


def test_a_budget_that_is_found_has_the_losses_of_a_fixed_one(device, tmp_path, monkeypatch):
    if device == "cpu":
        monkeypatch.setitem(METERS, "cpu", lambda _: LiveMeter(2**40))
    stage = (device, tmp_path)
    keys = {"microbatching": "packed", "max_steps_per_epoch": 12}
    expected = trained_losses(stage, "fixed", max_tokens_per_microbatch=256, **keys)
    found = trained_losses(stage, "auto", max_tokens_per_microbatch="auto", **keys)
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_resumed_run_has_bitwise_the_same_losses(device, tmp_path):
    stage = (device, tmp_path)
    keys = {"max_steps_per_epoch": 4, "save_every_n_steps": 2, "keep_last_n_checkpoints": None}
    whole = trained_losses(stage, "whole", **keys)
    shutil.copytree(tmp_path / "whole" / "step_2", tmp_path / "resumed" / "step_2")
    resumed = trained_losses(stage, "resumed", resume_from_checkpoint=True, **keys)
    assert resumed == whole[2:]
    assert len(whole) == 4
