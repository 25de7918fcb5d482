"""One line compares a training's peak with its forecast, whose process does not disturb the training."""

import os
import time
from types import SimpleNamespace

import pytest
import recipe_runs
import torch
from omegaconf import OmegaConf

from recipe_utils.memory.expected import ExpectedPeak
from recipe_utils.tune.registry import recipe_path


def updates(expected, longest=512, seconds=300):
    """Returns the first line that is logged after an update step."""
    step = SimpleNamespace(longest=longest, microbatches=[None] * 3)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        expected.before()
        if text := expected.after(step):
            return text
        if expected._num_steps > 2 and expected._process is None:
            return ""
        time.sleep(0.05)
    return "late"


@pytest.fixture
def measured(monkeypatch):
    """PyTorch's peak, 2 GiB; and variables of a launcher, which the process must not join."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2 * 2**30)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_a_line_compares_the_forecast_with_the_measured_peak(measured, weights_folder, tmp_path):
    config = recipe_runs.tiny_config(weights_folder, microbatching="packed")
    OmegaConf.save(OmegaConf.create(config), tmp_path / "config.yaml")
    recipe = str(recipe_path(recipe_runs.SFT))
    text = updates(ExpectedPeak(recipe, tmp_path / "config.yaml", 2))
    assert text.startswith("Peak memory at rows of 512 tokens: expected 0.0")
    assert "measured 2.00 GiB (+" in text


def test_without_a_forecast_nothing_is_logged(measured, tmp_path):
    assert updates(ExpectedPeak("none.py", tmp_path / "none.yaml", 2)) == ""
    assert updates(ExpectedPeak("none.py", tmp_path / "none.yaml", 2), longest=0) == ""  # images


def test_the_process_ends_with_the_training(measured, tmp_path):
    expected = ExpectedPeak("none.py", tmp_path / "none.yaml", 1)
    step = SimpleNamespace(longest=512, microbatches=[None])
    for _ in range(2):
        expected.before()
        expected.after(step)
    pid = expected._process.pid
    expected.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
