"""A training that is killed at any moment, through `tune run`, resumes as if it had not been.

All processes here are warm, see warm_tune.py, so that what is killed has mostly begun to train. A kill
during the seconds of its imports finds nothing to leave behind.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tiny
import yaml
from recipe_runs import KD, SFT, tiny_config, tiny_kd_config
from warm_tune import TUNE, Popen, children_of, python


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


@pytest.mark.parametrize(
    ("recipe", "nproc_per_node", "changes"),
    [
        (SFT, 1, {}),
        (
            SFT,
            2,
            {
                "enable_async_checkpointing": True,
                "model": tiny.adapted(tiny.MODEL, use_dora=True),
                "max_steps_per_epoch": 30,
            },
        ),
        (KD, 2, {"teacher_cache": "hidden", "pipeline_parallel_dim": 2, "max_steps_per_epoch": 30}),
    ],
    ids=["all-weights", "dora-asynchronous", "distillation-in-stages"],
)
def test_losses_after_kills_are_those_of_an_undisturbed_run(
    recipe, nproc_per_node, changes, weights_folder, tmp_path
):
    make = tiny_kd_config if recipe == KD else tiny_config
    path = write_config(weights_folder, tmp_path, make, **changes)
    arguments = (
        "--recipe", recipe, "--config", path, "--kills", "3", "--nproc_per_node", nproc_per_node,
    )  # fmt: skip
    done = python("-m", "recipe_utils.benchmark.kill_and_resume", *arguments, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert "3 kills" in last
    assert " 0 lost, 0 losses differ" in last
    assert last.endswith(" files compared, 0 differ")
    assert " 0 files compared" not in last


def start_on_two_ranks(started, *arguments, cwd=None):
    process = Popen(
        [TUNE, "run", "--nproc_per_node=2", *map(str, arguments)],
        cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    started.append(process)
    return process


def train_on_two_ranks(started, path, output_dir, *launcher_arguments):
    overrides = {
        "output_dir": output_dir,
        "resume_from_checkpoint": "auto",
        "metric_logger._component_": "torchtune.training.metric_logging.DiskLogger",
        "metric_logger.log_dir": f"{output_dir}/logs",
    }
    return start_on_two_ranks(
        started, *launcher_arguments, "full_finetune_update_step", "--config", path,
        *(f"{key}={value}" for key, value in overrides.items()),
    )  # fmt: skip


def losses_in(output_dir):
    """Every loss that was logged, by update step; a step that was made again has several."""
    found = {}
    for file in Path(output_dir).glob("logs/*.txt"):
        for step, loss in re.findall(r"Step (\d+) \| loss:(\S+) ", file.read_text()):
            found.setdefault(int(step), set()).add(loss)
    return found


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
    assert losses_in(tmp_path / "killed") == losses_in(tmp_path / "undisturbed")
    assert len(list((tmp_path / "killed" / "logs").glob("*.txt"))) == 2


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
