"""Fake steps take the bytes of real ones, and the command forecasts without files, ranks and memory."""

import os
import re
import shutil
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from big_batch_of_views import step_of_16
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import DINO, DPO, KD, SFT, recipe_class, refusal, slow
from tiny_transformers import save_tiny
from torch import UntypedStorage
from torch._subclasses import FakeTensorMode

from recipe_utils.forecast import Measured, largest_that_fits, measure, shares_of
from recipe_utils.forecast import __main__ as forecast
from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.settings.problems import ConfigError
from recipe_utils.tune.registry import RECIPES, config_path, recipe_path

SIZES = {SFT: (512, 1024), DPO: (512, 1024), KD: (512, 1024), DINO: (8, 16)}
WIDE = {"model": tiny.WIDE_UNTIED_MODEL, "microbatching": "packed"}
LORA = {**WIDE, "model": tiny.adapted(tiny.WIDE_UNTIED_MODEL)}
QLORA = {**WIDE, "model": tiny.adapted(tiny.WIDE_UNTIED_MODEL, quantize_base=True), "dtype": "bf16"}
MASTER = {"dtype": "bf16", "weights_dtype": "fp32"}
RECOMPUTED = {"enable_activation_checkpointing": True}
FUSED = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01, "fused": True}}


def real_peaks(recipe, config, folder):
    """Peaks of update steps with real weights on this rank, and bytes at rest."""
    cfg, kept = OmegaConf.create(config), ("checkpointer", "ref_checkpointer", "teacher_checkpointer")
    own = forecast.config_of(cfg, Path(folder), keys_of(recipe))
    own.update({key: config[key] for key in kept if key in config and recipe != DINO})
    live = LiveBytes()
    made = recipe_class(recipe)(own)
    with made.run:
        with live:
            made.setup(own)
        return peaks_of(made, live, partial(measure, made, live=live), own, SIZES[recipe])


def fake_peaks(recipe, config, num_ranks=1, make=LiveBytes):
    live, cfg = make(), OmegaConf.create(config)
    with forecast.set_up(str(recipe_path(recipe)), cfg, num_ranks, live) as (made, run):
        return peaks_of(made, live, run, cfg, SIZES[recipe])


def peaks_of(made, live, run, cfg, sizes):
    run(forecast.sizes_of(made, cfg)[0])
    return [run(size).peak for size in sizes], shares_of(made, live)


def keys_of(recipe):
    return recipe_class(recipe).__init__.__globals__["Settings"].__dataclass_fields__


def assert_alike(fake, real, bound=0.01):
    (peaks, shares), (expected, of_real) = fake, real
    assert peaks == pytest.approx(expected, rel=bound)
    assert peaks[1] - peaks[0] == pytest.approx(expected[1] - expected[0], rel=bound)
    assert shares[:3] == of_real[:3]
    assert shares.other == pytest.approx(of_real.other, rel=bound, abs=50_000)


@pytest.fixture
def config_of(tiny_config, tiny_dpo_config, tiny_kd_config):
    def make(recipe, **changes):
        if recipe == DINO:
            return {**step_of_16(tiny_config, batch_size=2, dtype="fp32"), **FUSED, **changes}
        makers = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config}
        return makers[recipe](**{**WIDE, **FUSED, **changes})

    return make


@pytest.mark.parametrize(
    ("recipe", "changes", "num_ranks"),
    [
        (SFT, {}, 1),
        (SFT, {**MASTER, **RECOMPUTED}, 2),
        (SFT, {**QLORA, **RECOMPUTED}, 1),
        (DPO, {}, 1),
        (KD, {}, 1),
        (DINO, {}, 1),
        slow(SFT, RECOMPUTED, 1),
        slow(SFT, MASTER, 1),
        slow(SFT, LORA, 1),
        slow(SFT, QLORA, 2),
        slow(SFT, {"microbatching": "in_order"}, 1),
        slow(SFT, {"microbatching": "least_padding", "optimizer": {"_component_": "recipe_utils.optim.AdamW8bit"}}, 2),
        slow(SFT, {"data_parallel_replicate_dim": 2, **MASTER}, 4),
        slow(DPO, LORA, 1),
        slow(DPO, {**MASTER, **RECOMPUTED}, 2),
        slow(KD, {**MASTER, **RECOMPUTED}, 2),
        slow(DINO, {**MASTER, **RECOMPUTED}, 2),
    ],
)  # fmt: skip
def test_fake_bytes_equal_real_ones(recipe, changes, num_ranks, config_of, tmp_path):
    config = config_of(recipe, **changes)
    fake = fake_peaks(recipe, config, num_ranks)
    if num_ranks == 1:
        assert_alike(fake, real_peaks(recipe, config, tmp_path))
    else:
        assert_alike(fake, run_distributed(real_peaks, num_ranks, recipe, config, tmp_path)[0])


@pytest.mark.parametrize("model_type", ["qwen3", slow("gemma3_text")])
def test_a_folder_of_transformers_needs_its_config_only(model_type, config_of, tmp_path):
    config = config_of(SFT, **save_tiny(tmp_path / "hf", model_type, hidden_size=256))
    real = real_peaks(SFT, config, tmp_path)
    for path in (tmp_path / "hf").iterdir():
        if path.name != "config.json":
            path.unlink()
    assert_alike(fake_peaks(SFT, config), real)
