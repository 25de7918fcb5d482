"""A training on several nodes resumes on those that are left; here, nodes are agents on one machine."""

import os
import re
import signal
import socket
import time

import pytest
import yaml
from programs import TUNE, Popen, children_of, tune_run_here
from recipe_runs import SFT

from recipe_utils.training.log import read_metrics

SECONDS = 600
"""The machine may be busy; undisturbed, a training takes 90 s."""


@pytest.fixture
def start(started, tmp_path):
    """Starts an agent of one rank, and waits for the rendezvous of the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = free.getsockname()
    options = [
        "--nnodes=2:4", "--nproc_per_node=1", "--max-restarts=3", "--rdzv_backend=c10d", "--local_addr=127.0.0.1",
        f"--rdzv_endpoint=127.0.0.1:{endpoint[1]}", "--rdzv_conf=last_call_timeout=15",
    ]  # fmt: skip

    def start(*arguments):
        with (tmp_path / f"{len(started)}.txt").open("wb") as screen:
            command = [TUNE, "run", *options, *arguments]
            started.append(Popen(command, cwd=tmp_path, stdout=screen, stderr=screen))
        wait_for(lambda: socket.socket().connect_ex(endpoint) == 0, started)
        return started[-1]

    return start


def wait_for(condition, agents):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        assert all(agent.poll() is None for agent in agents), "one ended too early"
        time.sleep(0.05)


@pytest.mark.slow
def test_training_resumes_with_the_same_losses_after_one_of_four_nodes_is_killed(tiny_config, tmp_path, start, started):
    """It is killed after update step 10 of 16. 4 ranks divide the batch, 3 do not; it shrinks at step 12."""
    killed = tmp_path / "killed"
    data = {"_component_": "tiny.waiting_dataset", "step": 10, "file": str(killed)}
    adam = {"_component_": "torch.optim.AdamW", "lr": 1e-5}
    batch = {"batch_size": 1, "global_batch_size": 16, "gradient_accumulation_steps": ...}
    files = {"metric_logger": None, "save_every_n_steps": 4, "resume_from_checkpoint": "auto"}
    data["num_samples"] = 16 * 16
    config = tiny_config(dataset=data, optimizer=adam, prefetch_update_steps=0, **batch, **files)
    config["checkpointer"]["output_dir"] = "${output_dir}"
    config["process_group_timeout_seconds"] = SECONDS
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))

    def metrics_in(folder):
        path = tmp_path / folder / "logs/metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    arguments = (SFT, "--config", "my.yaml", "output_dir=elastic")
    *others, lost = [start(*arguments) for _ in range(4)]
    wait_for(lambda: [each["step"] for each in metrics_in("elastic")][-1:] == [10], started)
    for pid in (*children_of(lost.pid), lost.pid):
        os.kill(pid, signal.SIGKILL)
    killed.touch()
    codes = [agent.wait(SECONDS) for agent in others]
    screens = "".join((tmp_path / f"{i}.txt").read_text() for i in range(3))
    assert codes == [0, 0, 0], screens

    code, screen = tune_run_here(SFT, "my.yaml", "output_dir=undisturbed", cwd=tmp_path)
    assert code == 0, screen
    steps, losses = zip(*((m["step"], m["loss"]) for m in metrics_in("elastic")), strict=True)
    assert [*steps] == [*range(1, 17)]
    assert losses == pytest.approx([m["loss"] for m in metrics_in("undisturbed")], rel=1e-6)
    # Once at most: the launcher may end a rank before it has found out by itself.
    report = r"rank (\d): another rank is gone \(Connection .* by peer\); the launcher starts again from step_8\n"
    reports = re.findall(report, screens)
    assert {*reports} <= {"0", "1", "2"}
    assert 1 <= len(reports) == len({*reports})
    assert "Traceback" not in screens
    assert re.findall("take (.*) samples\n", screens) == ["6, 5 and 5"]
