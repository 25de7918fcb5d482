"""Processes of a baseline."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recipe_runs import tiny_config

from recipe_utils.benchmark.baselines.kinds import TEXT
from recipe_utils.benchmark.baselines.worker import write_spec
from recipe_utils.benchmark.interleave import BaselineDiedError, Processes
from recipe_utils.benchmark.lineup import Baseline


def started(folder, timeout_seconds=60.0):
    logger = {"_component_": "recipe_utils.benchmark.interleave.LossLogger"}
    config = tiny_config(folder, metric_logger=logger, max_steps_per_epoch=8)
    baseline = Baseline("mine", "limit", TEXT, "", config, contents=[], draws_adapters=False)
    write_spec(folder / "spec.json", baseline, pad_id=0)
    return Processes("mine", folder / "spec.json", 1, folder / "{rank}.log", timeout_seconds)


def state_of(pid):
    """Returns Linux's letter for the state, T if stopped; None for a process that has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return None
    return None if state == "Z" else state


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_baseline_that_sends_nothing_times_out_and_is_killed(tmp_path):
    baseline = started(tmp_path, timeout_seconds=0.2)  # too short to import PyTorch
    with pytest.raises(BaselineDiedError, match=r"sent nothing for 0.2 s"):
        baseline.take_turn()
    (process,) = baseline._processes
    baseline.kill()
    assert process.returncode == -signal.SIGKILL
    baseline.kill()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_waiting_baseline_is_stopped_and_ends_with_the_benchmark(weights_folder, tmp_path):
    (tmp_path / "weights").symlink_to(weights_folder / "weights")
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; import test_interleave\n"
        "baseline = test_interleave.started(Path(sys.argv[1]))\n"
        "baseline.take_turn(); seconds, reports = baseline.take_turn()\n"
        "assert 0 < seconds < 30 and reports[0].num_positions > 0 and len(reports[0].losses) == 1\n"
        "print(baseline._processes[0].pid, flush=True); sys.stdin.read()"
    )
    benchmark = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pid = int(benchmark.stdout.readline())
        assert wait_for(lambda: state_of(pid) == "T")
    finally:
        os.kill(benchmark.pid, signal.SIGKILL)
        benchmark.communicate()
    assert wait_for(lambda: state_of(pid) is None)
