"""A training that is killed at any moment, through `tune run`, resumes as if it had not been."""

import os
import signal
import subprocess
import time

import pytest
import tiny
import yaml
from big_batch_of_views import step_of_16
from kill_and_resume import kill_and_resume, logging_to, losses_in
from programs import TUNE, Popen, children_of
from recipe_runs import DINO, KD, SFT, tiny_config, tiny_kd_config


def write_config(weights_folder, tmp_path, make=tiny_config, **changes):
    config = make(
        weights_folder,
        dataset={"_component_": "tiny.tiny_dataset", "num_samples": 400},
        batch_size=2,
        gradient_accumulation_steps=2,
        microbatching="packed",
        **changes,
    )
    config["checkpointer"]["output_dir"] = "${output_dir}"
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


SHORT = {"max_steps_per_epoch": 30}
IN_STAGES = {"pipeline_parallel_dim": 2}
CASES = {  # recipe, ranks, kills, changes
    "all weights": (SFT, 1, 2, SHORT),
    "dora, asynchronous": (
        SFT,
        2,
        3,
        {
            **SHORT,
            "enable_async_checkpointing": True,
            "model": tiny.adapted(tiny.MODEL, use_dora=True),
        },
    ),
    "distillation in stages": (KD, 2, 3, {**SHORT, **IN_STAGES, "teacher_cache": "hidden"}),
    "images": (DINO, 1, 3, {}),
    "images in stages": (DINO, 2, 3, IN_STAGES),
}


@pytest.mark.parametrize(
    "case", ["all weights"] + [pytest.param(c, marks=pytest.mark.slow) for c in list(CASES)[1:]]
)
def test_losses_after_kills_are_those_of_an_undisturbed_run(case, weights_folder, tmp_path):
    recipe, num_ranks, num_kills, changes = CASES[case]
    changes = {"save_every_n_steps": 2, "export_every_n_steps": 3, **changes}
    if recipe == DINO:
        path = write_config_of_images(weights_folder, tmp_path, **changes)
    else:
        make = tiny_kd_config if recipe == KD else tiny_config
        path = write_config(weights_folder, tmp_path, make, **changes)
    found = kill_and_resume([recipe, "--config", str(path)], tmp_path, num_kills, num_ranks)
    assert found.kills == num_kills
    assert found.lost_steps == found.different_losses == found.different_files == 0
    assert found.files > 0


def write_config_of_images(weights_folder, tmp_path, **changes):
    config = step_of_16(
        lambda **changes: tiny_config(weights_folder, **changes),
        dataset={"_component_": "tiny.tiny_images", "num_images": 150},
        dataset_val={"_component_": "tiny.tiny_images", "num_images": 21, "num_classes": 13},
        dataset_knn={"_component_": "tiny.tiny_images", "num_images": 31, "num_classes": 13},
        run_val_every_n_steps=5,
        knn_neighbors=5,
        optimizer={"_component_": "torch.optim.AdamW", "lr": 0.003, "weight_decay": 0.04},
        batch_size=4,
        epochs=2,
        dtype="fp32",
        **changes,
    )
    config["checkpointer"]["output_dir"] = "${output_dir}"
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start_on_two_ranks(started, *arguments, cwd=None):
    process = Popen(
        [TUNE, "run", "--nproc_per_node=2", *map(str, arguments)],
        cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    started.append(process)
    return process


def train_on_two_ranks(started, path, output_dir, *launcher_arguments):
    return start_on_two_ranks(
        started, *launcher_arguments, SFT, "--config", path, *logging_to(output_dir)
    )


def unique_losses(output_dir):
    """The different losses of each update step; several runs may have logged one step."""
    return {step: set(losses) for step, losses in losses_in(output_dir).items()}


def wait_for(condition, process):
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_gone(pids):
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_launcher_restarts_a_killed_rank_from_the_newest_checkpoint(
    weights_folder, tmp_path, started
):
    path = write_config(weights_folder, tmp_path, save_every_n_steps=5)
    undisturbed = train_on_two_ranks(started, path, tmp_path / "undisturbed")
    killed = train_on_two_ranks(started, path, tmp_path / "killed", "--max-restarts=3")
    wait_for(lambda: list((tmp_path / "killed").glob("step_*5")), killed)
    os.kill(children_of(killed.pid)[-1], signal.SIGKILL)
    assert killed.wait(240) == 0
    assert undisturbed.wait(240) == 0
    assert len(losses_in(tmp_path / "undisturbed")) == 50
    assert unique_losses(tmp_path / "killed") == unique_losses(tmp_path / "undisturbed")
    assert len(list((tmp_path / "killed" / "logs").glob("*.txt"))) == 2


@pytest.mark.slow
def test_a_signal_to_the_launcher_leaves_a_whole_checkpoint_and_no_process(
    weights_folder, tmp_path, started
):
    path = write_config(weights_folder, tmp_path, save_every_n_steps=1000, num_workers=1)
    process = train_on_two_ranks(started, path, tmp_path / "out")
    wait_for(lambda: losses_in(tmp_path / "out"), process)
    workers = children_of(process.pid)
    process.terminate()
    assert process.wait(240) == 0
    logged = losses_in(tmp_path / "out")
    assert 1 < len(logged) < 50
    assert [p.name for p in (tmp_path / "out").glob("step_*")] == [f"step_{max(logged)}"]
    assert_gone(workers)
    resumed = train_on_two_ranks(started, path, tmp_path / "out")
    assert resumed.wait(240) == 0
    assert len(losses_in(tmp_path / "out")) == 50


RECIPE_THAT_DIES_OF_SIGNALS = """
import os, time
open(f"{os.environ['TORCHELASTIC_RESTART_COUNT']}_{os.environ['RANK']}", "w").close()
time.sleep(600)
"""


@pytest.mark.slow
def test_ranks_that_die_of_the_signal_are_not_restarted_and_the_launcher_fails(tmp_path, started):
    (tmp_path / "any.py").write_text(RECIPE_THAT_DIES_OF_SIGNALS)
    arguments = ("--max-restarts=3", "any.py", "--config", "any")
    process = start_on_two_ranks(started, *arguments, cwd=tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("0_*"))) == 2, process)
    workers = children_of(process.pid)
    process.terminate()
    assert process.wait(240) == 1
    assert not list(tmp_path.glob("1_*"))
    assert_gone(workers)


RECIPE_THAT_WAITS_FOR_A_SECOND_SIGNAL = """
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: open(f"asked_{os.environ['RANK']}", "w").close())
open(f"runs_{os.environ['RANK']}", "w").close()
while True:
    time.sleep(1)
"""


@pytest.mark.slow
def test_a_second_signal_to_the_launcher_ends_ranks_that_go_on(tmp_path, started):
    (tmp_path / "any.py").write_text(RECIPE_THAT_WAITS_FOR_A_SECOND_SIGNAL)
    process = start_on_two_ranks(started, "any.py", "--config", "any", cwd=tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("runs_*"))) == 2, process)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: len(list(tmp_path.glob("asked_*"))) == 2, process)
    process.terminate()
    assert process.wait(240) == 1
    assert_gone(workers)
