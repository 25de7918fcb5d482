"""A training that is killed at any moment, through `tune run`, resumes as if it had not been."""

import contextlib
import fcntl
import os
import signal
import sys
import termios
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest
import tiny
import yaml
from kill_and_resume import Run, kill_and_resume, logging_to, losses_in
from programs import TUNE, Popen, children_of
from recipe_runs import SFT, slow, tiny_config


def write(config, tmp_path):
    config["checkpointer"]["output_dir"] = "${output_dir}"
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


DATA = {"_component_": "tiny.tiny_dataset"}


def config_of_text(weights_folder, **changes):
    given = {
        "dataset": {**DATA, "num_samples": 400},
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "microbatching": "packed",
    }
    return tiny_config(weights_folder, **{**given, **changes})


SHORT = {"max_steps_per_epoch": 30}
MIXTURE = {
    "dataset": [
        {**DATA, "num_samples": 40, "weight": 0.5},
        {**DATA, "num_samples": 300, "seed": 1, "name": "other", "weight": 0.3},
    ],
    "mixture": {"samples_per_epoch": 70},
    "max_steps_per_epoch": None,
    "epochs": 2,
    "num_workers": 1,
}
DORA = {"model": tiny.adapted(tiny.MODEL, use_dora=True, lora_dropout=0.3), "enable_async_checkpointing": True}
CASES = {"all weights": (1, SHORT), "a mixture, dora, asynchronous": (2, {**MIXTURE, **DORA})}


@pytest.mark.parametrize("case", ["all weights", *map(slow, list(CASES)[1:])])
def test_losses_after_kills_are_those_of_an_undisturbed_run(case, weights_folder, tmp_path):
    num_ranks, changes = CASES[case]
    changes = {"save_every_n_steps": 2, "export_every_n_steps": 3, **changes}
    config = config_of_text(weights_folder, **changes)
    found = kill_and_resume([SFT, "--config", str(write(config, tmp_path))], tmp_path, 2, num_ranks)
    assert found.kills == 2
    assert found.lost_steps == found.different_losses == found.different_files == 0
    assert found.files > 0


@pytest.fixture
def start(started):
    """Starts `tune run` on two ranks with these arguments."""

    def start(*arguments, cwd=None):
        process = Popen(
            [TUNE, "run", "--nproc_per_node=2", *map(str, arguments)],
            cwd=cwd, stdout=DEVNULL, stderr=DEVNULL,
        )  # fmt: skip
        started.append(process)
        return process

    return start


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
def test_a_launcher_restarts_a_killed_rank_from_the_newest_checkpoint(weights_folder, tmp_path, start):
    path = write(config_of_text(weights_folder, save_every_n_steps=5), tmp_path)
    undisturbed_dir, killed_dir = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed = Run([SFT, "--config", str(path)], undisturbed_dir, 2)
    killed = start("--max-restarts=3", SFT, "--config", path, *logging_to(killed_dir))
    wait_for(lambda: list(killed_dir.glob("step_*5")), killed)
    os.kill(children_of(killed.pid)[-1], signal.SIGKILL)
    assert killed.wait(240) == undisturbed.wait(None) == 0
    expected = losses_in(undisturbed_dir)
    assert len(expected) == 50
    # Both runs of the killed training may have logged the same step.
    losses = {step: set(logged) for step, logged in losses_in(killed_dir).items()}
    assert losses == {step: set(logged) for step, logged in expected.items()}
    assert len(list((killed_dir / "logs").glob("*.txt"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP] * 2], ids=["SIGTERM", "SIGHUP twice"])
def test_a_signal_to_the_launcher_leaves_a_whole_checkpoint_and_no_process(numbers, weights_folder, tmp_path, start):
    config = config_of_text(weights_folder, save_every_n_steps=1000, num_workers=1)
    arguments = [SFT, "--config", str(write(config, tmp_path))]
    process = start(*arguments, *logging_to(tmp_path / "out"))
    wait_for(lambda: losses_in(tmp_path / "out"), process)
    workers = children_of(process.pid)
    for number in numbers:
        process.send_signal(number)
    assert process.wait(240) == 0
    logged = losses_in(tmp_path / "out")
    assert 1 < len(logged) < 50
    assert [p.name for p in (tmp_path / "out").glob("step_*")] == [f"step_{max(logged)}"]
    assert_gone(workers)
    assert Run(arguments, tmp_path / "out", 2).wait(None) == 0
    assert len(losses_in(tmp_path / "out")) == 50


@pytest.mark.parametrize("num_ranks", [1, slow(2)])
def test_signals_of_a_scheduler_during_the_imports_save_a_checkpoint_that_resumes(
    num_ranks, weights_folder, tmp_path, started
):
    """Slurm sends them to the launcher, to each rank, or to both."""
    arguments = [SFT, "--config", str(write(config_of_text(weights_folder, **SHORT, epochs=1), tmp_path))]
    signalled_dir, undisturbed_dir = tmp_path / "signalled", tmp_path / "undisturbed"
    ranks = [f"--nproc_per_node={num_ranks}"] * (num_ranks > 1)
    process = Popen([TUNE, "run", *ranks, *arguments, *logging_to(signalled_dir)], stdout=DEVNULL, stderr=PIPE)
    started.append(process)
    assert process.stderr.readline().startswith(b"Importing PyTorch, torchtune")
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: len(children_of(process.pid)) == len(ranks) * num_ranks, process)
    for pid in [*children_of(process.pid), process.pid]:
        os.kill(pid, signal.SIGUSR2)
    process.communicate(timeout=240)
    assert process.returncode == 0
    assert list(losses_in(signalled_dir)) == [1]
    for folder in (signalled_dir, undisturbed_dir):
        assert Run(arguments, folder, num_ranks).wait(None) == 0
    assert losses_in(signalled_dir) == losses_in(undisturbed_dir)
    assert len(losses_in(signalled_dir)) == 30


@pytest.mark.skipif(sys.platform != "linux", reason="reads what a process has loaded from /proc on Linux")
@pytest.mark.parametrize("delay_seconds", [0, slow(0.2), slow(1), slow(3)])
@pytest.mark.parametrize("name", [slow("one process"), "two ranks", slow("show_data")])
def test_an_interrupt_during_the_imports_ends_in_one_line(name, delay_seconds, weights_folder, tmp_path, started):
    arguments = [SFT, "--config", str(write(config_of_text(weights_folder, epochs=1000), tmp_path))]
    ranks = ["--nproc_per_node=2"] * (name == "two ranks")
    command = [sys.executable, "-m", "recipe_utils.show_data", *arguments]
    if name != "show_data":
        command = [TUNE, "run", *ranks, *arguments, *logging_to(tmp_path / "out")]
    process = Popen(command, stdout=DEVNULL, stderr=PIPE, text=True)
    started.append(process)
    if name == "show_data":
        wait_for(lambda: "/torch/" in Path(f"/proc/{process.pid}/maps").read_text(), process)
    else:
        assert process.stderr.readline().startswith("Importing PyTorch, torchtune")
        # `children_of` takes longer than torchrun needs until it has a list of its ranks.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for(lambda: len(children.read_text().split()) == 2 * len(ranks), process)
    time.sleep(delay_seconds)
    process.send_signal(signal.SIGINT)
    printed = [
        line for line in process.communicate(timeout=240)[1].splitlines() if "torch/distributed/run.py" not in line
    ]
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)  # to a shell the same
    assert len(printed) == len(ranks), printed


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_during_their_imports_end(weights_folder, tmp_path, started):
    arguments = [SFT, "--config", str(write(config_of_text(weights_folder, epochs=1000), tmp_path))]
    command = [TUNE, "run", "--nproc_per_node=2", *arguments, *logging_to(tmp_path / "out")]
    process = Popen(command, stdout=DEVNULL, stderr=PIPE, text=True)
    started.append(process)
    process.stderr.readline()
    wait_for(lambda: len(children_of(process.pid)) == 2, process)
    process.kill()
    process.communicate(timeout=120)  # until the ranks, which have its pipe, have ended


SLOW_DISK = """
import os, time, tiny
def dataset(*args, **given):
    fsync = os.fsync
    os.fsync = lambda file: (time.sleep(0.5), fsync(file))
    return tiny.tiny_dataset(*args, **given)
"""


@pytest.mark.slow
def test_a_second_signal_to_the_launcher_does_not_undo_a_save(weights_folder, tmp_path, start):
    (tmp_path / "mine.py").write_text(SLOW_DISK)
    config = config_of_text(weights_folder, dataset={"_component_": "mine.dataset", "num_samples": 400})
    process = start(SFT, "--config", write(config, tmp_path), *logging_to(tmp_path / "out"), cwd=tmp_path)
    wait_for(lambda: losses_in(tmp_path / "out"), process)
    process.terminate()
    wait_for(lambda: list((tmp_path / "out").glob("step_*.tmp")), process)
    process.terminate()
    assert process.wait(240) == 0
    assert [path.name for path in (tmp_path / "out").glob("step_*")] == [f"step_{max(losses_in(tmp_path / 'out'))}"]


def read_now(terminal):
    """Reads what a terminal shows, or programs would wait for space in it."""
    with contextlib.suppress(OSError):
        os.read(terminal, 1 << 16)


@pytest.mark.skipif(sys.platform != "linux", reason="opens a terminal of Linux")
@pytest.mark.parametrize("num_ranks", [slow(1), slow(2)])
def test_a_run_whose_terminal_is_closed_leaves_a_checkpoint_unless_nohup_is_before_it(
    num_ranks, weights_folder, tmp_path, started
):
    # So long that it has not ended before a busy machine closes its terminal.
    data = {"dataset": {**DATA, "num_samples": 1600}, "num_workers": num_ranks % 2}
    config = config_of_text(weights_folder, save_every_n_steps=1000, **data)
    arguments = [SFT, "--config", str(write(config, tmp_path))]
    ranks = [f"--nproc_per_node={num_ranks}"] * (num_ranks > 1)
    for name, nohup in (("closed", []), ("nohup", ["nohup"])):
        ours, theirs = os.openpty()
        command = [*nohup, TUNE, "run", *ranks, *arguments, *logging_to(tmp_path / name)]
        process = Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=tmp_path,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        started.append(process)
        os.close(theirs)
        os.set_blocking(ours, False)
        wait_for(lambda ours=ours, name=name: read_now(ours) or losses_in(tmp_path / name), process)
        os.close(ours)
        assert process.wait(240) == 0
    steps = [*losses_in(tmp_path / "closed")]
    assert len(steps) < len(losses_in(tmp_path / "nohup")) == 400 // num_ranks
    assert [path.name for path in (tmp_path / "closed").glob("step_*")] == [f"step_{max(steps)}"]


def descendants_of(pid):
    return [each for child in children_of(pid) for each in (child, *descendants_of(child))]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads states of processes from /proc")
def test_no_process_outlives_a_program_that_is_killed(weights_folder, tmp_path):
    """Its DataLoader workers end, too."""
    config = config_of_text(weights_folder, num_workers=2, epochs=1000)
    run = Run([SFT, "--config", str(write(config, tmp_path))], tmp_path / "out", 1)
    try:
        while not losses_in(tmp_path / "out"):
            assert run.wait(0.01) is None, run.output()
        (program,) = run.ranks
        pids = descendants_of(program.pid)
        assert len(pids) >= 2
        program.kill()
        program.join()
        deadline = time.monotonic() + 10
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in pids if is_alive(pid)]
    finally:
        run.kill()


CATCHES_SIGNALS = """
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: open(f"received_{os.environ['RANK']}", "w").close())
open(f"runs_{os.environ['TORCHELASTIC_RESTART_COUNT']}_{os.environ['RANK']}", "w").close()
while True:
    time.sleep(1)
"""


@pytest.mark.slow
def test_ranks_that_a_second_signal_ends_are_not_restarted(tmp_path, start):
    """The launcher exits with an error."""
    (tmp_path / "any.py").write_text(CATCHES_SIGNALS)
    process = start("--max-restarts=3", "any.py", "--config", "any", cwd=tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("runs_0_*"))) == 2, process)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: len(list(tmp_path.glob("received_*"))) == 2, process)
    process.terminate()
    assert process.wait(240) == 1
    assert len(list(tmp_path.glob("runs_*"))) == 2
    assert_gone(workers)
