"""Bad input is refused before training, by the name of its key or sample, and nothing is written."""

import os
from pathlib import Path

import pytest
import tiny
import torch
from checkpoint_runs import Malicious
from recipe_runs import DPO, refusal
from safetensors.torch import save_file


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"checkpoint_files": ["gone.pt"]}, "No file with name: gone.pt"),
        ({"checkpoint_dir": "/nowhere"}, "/nowhere is not a valid directory"),
        (
            {"checkpoint_dir": "/nowhere", "_component_": "torchtune.training.FullModelHFCheckpointer"},
            "[Errno 2] No such file or directory: '/nowhere/config.json'",
        ),
    ],
    ids=["file", "directory", "config.json"],
)
def test_missing_files_of_a_checkpoint_are_reported(changes, expected, tiny_config):
    config = tiny_config()
    config["checkpointer"] |= changes
    assert f"checkpointer: {expected}" in refusal(config)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("weights.pt", "unreadable", "Input/output error"),
        ("weights.safetensors", "truncated", "incomplete metadata, file not fully covered"),
    ],
)
def test_unreadable_weights_are_reported_with_the_reason(name, damage, reason, tiny_config, tmp_path):
    path = tmp_path / "weights" / name
    path.parent.mkdir()
    if damage == "truncated":
        save_file({"weight": torch.zeros(1000)}, path)
        os.truncate(path, 2000)
    else:  # also for root, who may read every file
        path.symlink_to("/proc/self/mem")
    config = tiny_config()
    config["checkpointer"] |= {"checkpoint_dir": str(path.parent), "checkpoint_files": [name]}
    text = refusal(config)
    assert f"checkpointer: Unable to load checkpoint from {path}" in text
    assert reason in text


def test_an_unwritable_or_missing_output_directory_is_reported(tiny_config, tmp_path):
    (tmp_path / "file").write_text("")
    folder = f"{tmp_path}/file/out"
    config = tiny_config()
    for each in (folder, f"{tmp_path}/{'long' * 80}/out"):
        text = refusal(config | {"output_dir": each})
        assert f"output_dir={each}: it cannot be written to" in text
    assert "output_dir: it is missing" in refusal(config | {"output_dir": None})


def test_a_refused_config_creates_no_folder(tiny_dpo_config, tmp_path):
    folders = {"output_dir": f"{tmp_path}/new/out", "reference_cache_dir": f"{tmp_path}/new/cache"}
    assert "batch_size=0" in refusal(tiny_dpo_config(**folders, reference="cached", batch_size=0), DPO)
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_of_another_size_is_refused_before_training(tiny_config):
    text = refusal(tiny_config(model={**tiny.MODEL, "intermediate_dim": 64}))
    assert "its shapes differ: layers.0.mlp.w1.weight (48, 32)" in text


@pytest.mark.parametrize("resumes", [True, "auto"])
def test_training_does_not_resume_from_a_recipe_state_of_torchtune(resumes, tiny_config):
    config = tiny_config(resume_from_checkpoint=resumes)
    path = Path(config["checkpointer"]["output_dir"], "recipe_state", "recipe_state.pt")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    assert f"checkpointer.recipe_checkpoint={path}: training cannot resume from" in refusal(config)


def test_a_pickle_that_would_execute_something_is_refused_unexecuted(tiny_config, tmp_path):
    crime, path = tmp_path / "crime", tmp_path / "weights.pt"
    torch.save({"model": Malicious(crime)}, path)
    config = tiny_config()
    config["checkpointer"] |= {"checkpoint_dir": f"{tmp_path}", "checkpoint_files": [path.name]}
    config["checkpointer"]["output_dir"] = f"{tmp_path.parent}/{tmp_path.name}_out"
    text = refusal(config)
    assert f"checkpointer: Unable to load checkpoint from {path}" in text
    assert "Weights only load failed" in text
    assert not crime.exists()
    torch.load(path, weights_only=False)
    assert crime.exists(), "the pickle is harmless"
