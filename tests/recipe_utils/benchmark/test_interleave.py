"""A peer's processes, started for real."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recipe_runs import tiny_config

from recipe_utils.benchmark.interleave import PeerDiedError, PeerProcesses
from recipe_utils.benchmark.peer_configs import Peer
from recipe_utils.benchmark.worker import write_spec


def spec_of(folder, kind="limit", **changes):
    config = {
        **tiny_config(folder, **changes),
        "metric_logger": {"_component_": "recipe_utils.benchmark.interleave.LossLogger"},
        "max_steps_per_epoch": 8,
    }
    peer = Peer("mine", kind, {}, config)
    return write_spec(folder / "spec.json", "turns", peer, config, 0, folder / "references")


def started(folder, timeout_seconds=60.0):
    return PeerProcesses("mine", folder / "spec.json", 1, folder / "{rank}.log", timeout_seconds)


def state_of(pid):
    """A letter of Linux's: T is stopped; None for a process that is gone or only waits to be read."""
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


def test_a_peer_that_says_nothing_is_given_up_and_killed(tmp_path):
    spec_of(tmp_path)
    peer = started(tmp_path, timeout_seconds=0.2)  # too short to import PyTorch
    with pytest.raises(PeerDiedError, match=r"said nothing for 0.2 s"):
        peer.take_turn()
    (process,) = peer._processes
    peer.kill()
    assert process.returncode == -signal.SIGKILL
    peer.kill()


def test_a_waiting_peer_stands_still_and_dies_with_the_benchmark(weights_folder, tmp_path):
    if sys.platform != "linux":
        pytest.skip("only Linux ends a stopped process with its parent")
    (tmp_path / "weights").symlink_to(weights_folder / "weights")
    spec_of(tmp_path)
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; import test_interleave\n"
        "peer = test_interleave.started(Path(sys.argv[1]))\n"
        "peer.take_turn(); seconds, reports = peer.take_turn()\n"
        "assert 0 < seconds < 30 and reports[0].num_slots > 0 and len(reports[0].losses) == 1\n"
        "print(peer._processes[0].pid, flush=True); sys.stdin.read()"
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
