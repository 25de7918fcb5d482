"""Kills a training at random moments, resumes it, and compares it with an undisturbed run.

Every process of the training gets a SIGKILL, wherever it is: loading, computing, staging or writing a checkpoint,
exporting. Every second kill waits for the next moment at which a checkpoint or an export is being written.
"""

import contextlib
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import socket
import sys
import time
import zlib
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from distributed_runs import fork_context
from programs import recipe_file


@dataclass
class Comparison:
    """Counts over all trainings that were killed and resumed."""

    kills: int = 0
    kills_while_writing: int = 0
    resumes: int = 0
    trainings: int = 0
    """Trainings that reached their end."""
    lost_steps: int = 0
    """Update steps without a logged loss."""
    different_losses: int = 0
    files: int = 0
    """Exported files that were compared."""
    different_files: int = 0


def kill_and_resume(
    arguments: list[str], folder: Path, num_kills: int, num_ranks: int = 1, seed: int = 0
) -> Comparison:
    """Kills trainings until `num_kills`, then lets the last one reach its end.

    Losses and exported files, those of the final weights included, are compared bitwise with an undisturbed run:
    after each kill those that exist by then, at the end of a training all. A training that ends is started again.

    Args:
        arguments: of `tune run`: recipe, config and overrides.
        folder: for the output.
        num_kills: trainings to kill.
        num_ranks: processes of the training.
        seed: of the moments.
    """
    rng = random.Random(seed)
    started = time.monotonic()
    reference = _Run(arguments, folder / "reference", num_ranks)
    assert reference.wait(None) == 0, reference.output()
    duration = time.monotonic() - started
    expected = {step: losses[-1] for step, losses in losses_in(reference.output_dir).items()}
    expected_files = exported_files(reference.output_dir)

    counts = Comparison()
    run_folder = folder / "run_0"
    is_last = False
    while not is_last:
        is_last = counts.kills >= num_kills  # left alone, so that what was killed is compared
        counts.resumes += any(run_folder.glob("step_*"))
        before, left_over = losses_in(run_folder), being_written(run_folder)
        run = _Run(arguments, run_folder, num_ranks)
        status = run.wait(None if is_last else rng.uniform(0.1, 1.1) * duration)
        while counts.kills % 2 and status is None and not being_written(run_folder) - left_over:
            status = run.wait(0.001)
        if status is None:
            run.kill()
            counts.kills += 1
            counts.kills_while_writing += bool(being_written(run_folder) - left_over)
        else:
            assert status == 0, run.output()
        logged = losses_in(run_folder)
        for step, losses in logged.items():
            new = losses[len(before.get(step, ())) :]
            counts.different_losses += sum(loss != expected.get(step) for loss in new)
        exported = exported_files(run_folder)
        counts.files += len(exported)
        counts.different_files += sum(expected_files.get(n) != crc for n, crc in exported.items())
        if status == 0:
            counts.different_files += len(expected_files.keys() - exported.keys())
            counts.lost_steps += len(expected.keys() - logged.keys())
            counts.trainings += 1
            shutil.rmtree(run_folder)
            run_folder = folder / f"run_{counts.trainings}"
    return counts


def being_written(output_dir: Path) -> set[tuple[str, int]]:
    """Temporary folders of checkpoints and exports, each with its inode."""
    found = set()
    for path in output_dir.glob("*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def exported_files(output_dir: Path) -> dict[str, int]:
    """The CRC-32 of each exported file."""
    return {
        str(path.relative_to(output_dir)): zlib.crc32(path.read_bytes())
        for pattern in ("epoch_*", "export_step_*")
        for folder in output_dir.glob(pattern)
        for path in folder.rglob("*")
        if path.is_file()
    }


def losses_in(output_dir: Path) -> dict[int, list[str]]:
    """All losses that DiskLogger has logged there, by update step, as printed; a repeated step has several."""
    found: dict[int, list[str]] = {}
    for path in sorted(output_dir.glob("logs/*.txt")):
        for step, loss in re.findall(r"Step (\d+) \| loss:(\S+) .*\n", path.read_text()):
            found.setdefault(int(step), []).append(loss)
    return found


def logging_to(output_dir: Path) -> list[str]:
    """Overrides with which a run logs to files that `losses_in` reads, and resumes from what is there."""
    return [
        f"output_dir={output_dir}",
        "metric_logger._component_=torchtune.training.metric_logging.DiskLogger",
        f"metric_logger.log_dir={output_dir}/logs",
        "log_every_n_steps=1",
        "resume_from_checkpoint=auto",
    ]


class _Run:
    """A training, by forks of the processes that have imported what it needs."""

    def __init__(self, arguments: list[str], output_dir: Path, num_ranks: int) -> None:
        self.output_dir = output_dir
        output_dir.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = [*arguments, *logging_to(output_dir)]
        self._ranks = []
        for rank in range(num_ranks):
            given = (arguments, str(output_dir / "output.txt"), rank, num_ranks, port)
            self._ranks.append(fork_context.Process(target=_train, args=given))
            self._ranks[-1].start()

    def wait(self, timeout_seconds: float | None) -> int | None:
        """The exit status; None if the training still runs after the time."""
        wait([rank.sentinel for rank in self._ranks], timeout_seconds)
        if not any(rank.exitcode is not None for rank in self._ranks):
            return None
        for rank in self._ranks:
            rank.join()
        return max(abs(rank.exitcode or 0) for rank in self._ranks)

    def kill(self) -> None:
        """Kills the training and all processes that it has started."""
        for rank in self._ranks:
            for pid in [rank.pid, *_descendants(rank.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            rank.join()

    def output(self) -> str:
        """What the training has printed so far."""
        return (self.output_dir / "output.txt").read_text()


def _train(arguments: list[str], output: str, rank: int, num_ranks: int, port: int) -> None:
    """Runs the recipe's main program as `tune run` or torchrun do."""
    with open(output, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if num_ranks > 1:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        values = map(str, (rank, rank, num_ranks, num_ranks, port))
        os.environ.update(zip(names, values, strict=True), MASTER_ADDR="127.0.0.1")
    multiprocessing.set_start_method(None, force=True)  # that of the fork server's child is its own
    sys.argv = [recipe_file(arguments[0]), *arguments[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _descendants(pid: int) -> list[int]:
    """Processes that `pid` has started, and theirs; workers of a launcher have sessions of their own."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        of_parent = children.get(waiting.pop(), [])
        found += of_parent
        waiting += of_parent
    return found
