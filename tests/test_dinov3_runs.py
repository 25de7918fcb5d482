"""Self-supervised training as users start it, with `tune run`: killed, gone on with, and what it says at its end.

All processes here are warm, see warm_tune.py.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from big_batch_of_views import step_of_16
from recipe_runs import DINO
from warm_tune import TUNE, Popen, children_of, tune

from recipe_utils.run.log import read_metrics

NUM_STEPS = 2 * 10  # of 2 epochs, the last of each of 6 images


@pytest.fixture
def config_file(tiny_config, tmp_path):
    """Of 150 images and two epochs."""
    config = step_of_16(
        tiny_config,
        dataset={"_component_": "tiny.tiny_images", "num_images": 150},
        dataset_val={"_component_": "tiny.tiny_images", "num_images": 21, "num_classes": 13},
        dataset_knn={"_component_": "tiny.tiny_images", "num_images": 31, "num_classes": 13},
        run_val_every_n_steps=5,
        knn_neighbors=5,
        optimizer={"_component_": "torch.optim.AdamW", "lr": 0.003, "weight_decay": 0.04},
        batch_size=4,
        epochs=2,
        save_every_n_steps=5,
        dtype="fp32",
    )
    config["checkpointer"]["output_dir"] = "${output_dir}"
    del config["metric_logger"]
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def losses_in(folder):
    lines = read_metrics(Path(folder, "logs", "metrics.jsonl"))
    return {line["step"]: (line["loss"], line["num_images_seen"]) for line in lines}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_killed_and_resumed_it_leaves_the_same_files_and_says_what_was_done(
    num_ranks, config_file, tmp_path, started
):
    launcher = ["--nproc_per_node", "2"] if num_ranks == 2 else []
    stages = [f"pipeline_parallel_dim={num_ranks}"]

    def arguments(name, *overrides):
        to = f"output_dir={tmp_path}/{name}"
        return ["run", *launcher, DINO, "--config", str(config_file), to, *stages, *overrides]

    undisturbed = tune(*arguments("undisturbed"))
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
    killed = Popen(
        [TUNE, *arguments("killed")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    started.append(killed)
    deadline = time.monotonic() + 240
    while not list((tmp_path / "killed").glob("step_*[05]/")):
        assert killed.poll() is None, "it ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill([killed.pid, *children_of(killed.pid)][num_ranks - 1], signal.SIGKILL)
    assert killed.wait(240) != 0
    assert not (tmp_path / "killed" / "epoch_1").exists()

    resumed = tune(*arguments("killed", "resume_from_checkpoint=True"))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "Goes on from" in resumed.stdout + resumed.stderr
    for epoch in range(2):
        found, expected = (
            files_of(tmp_path / run / f"epoch_{epoch}") for run in ("killed", "undisturbed")
        )
        assert {"model.safetensors", "heads.safetensors", "config.json"} <= found.keys()
        assert found == expected
    assert losses_in(tmp_path / "killed") == losses_in(tmp_path / "undisturbed")

    said = undisturbed.stdout + undisturbed.stderr
    assert re.search(rf"{NUM_STEPS} update steps, 300 images in .* s: [\d,]+ images/s", said), said
    accuracies = {
        line["step"]: line["knn_accuracy"]
        for line in read_metrics(tmp_path / "undisturbed/logs/metrics.jsonl")
        if "knn_accuracy" in line
    }
    assert [*accuracies] == [5, 10, 15, 20]
    assert f"knn_accuracy: first {accuracies[5]:.3f}, last {accuracies[20]:.3f}, best" in said
    assert f"Model: {tmp_path}/undisturbed/epoch_1" in said
    for words in ("target tokens", "tok/s", "Ask it", "val_loss"):
        assert words not in said
    assert not (tmp_path / "undisturbed" / "generation.yaml").exists()
    assert re.search(r"loss \d+\.\d+ \| .*img/s \| knn \d\.\d{3} ", said), said[-3000:]
