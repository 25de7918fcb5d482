"""The README's first commands: the embedded default trains on real text, saves, loads and answers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config

from recipe_utils.registry import config_path

TUNE = str(Path(sys.executable).with_name("tune"))


def tune_run(recipe, config_name, *overrides):
    done = subprocess.run(
        [TUNE, "run", recipe, "--config", config_name, *overrides],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Output folder of the embedded default after 10 of its update steps."""
    folder = tmp_path_factory.mktemp("embedded")
    tune_run(
        "full_finetune_update_step",
        "llama3_2/5M_full_update_step",
        f"output_dir={folder}",
        "max_steps_per_epoch=10",
        "run_val_every_n_steps=3",
    )
    return folder


def test_train_and_validation_loss_fall(trained):
    (log,) = trained.glob("logs/*.txt")
    losses = [float(x) for x in re.findall(r"\| loss:([\d.]+)", log.read_text())]
    val_losses = [float(x) for x in re.findall(r"val_loss:([\d.]+)", log.read_text())]
    assert len(losses) == 10
    assert losses[0] == pytest.approx(8.4, abs=0.1)  # about ln(4096): fresh weights know nothing
    assert losses[-1] < 7.5
    assert len(val_losses) == 3
    assert val_losses[-1] < val_losses[0] - 0.2


def test_the_readme_s_next_command_samples_from_the_checkpoint(trained):
    printed = tune_run(
        "generate",
        "llama3_2/5M_generation",
        f"output_dir={trained}",
        "max_new_tokens=5",
        "prompt.user=What does `os.path.join` do?",
    )
    assert "What does `os.path.join` do?\n\n" in printed
    assert "Time for inference" in printed


def test_the_checkpoint_loads_in_transformers_with_equal_logits(trained):
    transformers = pytest.importorskip("transformers")
    cfg = OmegaConf.load(config_path("llama3_2/5M_generation"))
    cfg.output_dir = str(trained)
    model = config.instantiate(cfg.model)
    model.load_state_dict(config.instantiate(cfg.checkpointer).load_checkpoint()["model"])
    hugging_face = transformers.LlamaForCausalLM.from_pretrained(trained / "epoch_0")
    tokens = torch.randint(4096, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (model(tokens) - hugging_face(tokens).logits).abs().max() < 1e-4
