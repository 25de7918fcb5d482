"""Kills all processes of a training at random moments, resumes it, and compares it with an undisturbed run."""

import contextlib
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
from programs import become_program, recipe_file


@dataclass
class Comparison:
    """Counts over all runs of the killed training."""

    kills: int = 0
    lost_steps: int = 0  # without a logged loss
    different_losses: int = 0
    files: int = 0  # exported ones that were compared
    different_files: int = 0


def kill_and_resume(arguments: list[str], folder: Path, num_kills: int, num_ranks: int = 1) -> Comparison:
    """Kills a training ``num_kills`` times, then lets it reach its end. One that ends earlier is started again.

    Every second kill waits until a checkpoint or an export is being written. Losses and exported files are
    compared bitwise with an undisturbed run: after a kill those that exist, at the end all.
    ``arguments`` are those of ``tune run``.
    """
    rng = random.Random(0)
    started = time.monotonic()
    reference = Run(arguments, folder / "reference", num_ranks)
    assert reference.wait(None) == 0, reference.output()
    duration = time.monotonic() - started
    expected = {step: losses[-1] for step, losses in losses_in(reference.output_dir).items()}
    expected_files = exported_files(reference.output_dir)
    assert expected
    assert expected_files

    counts = Comparison()
    run_folder = folder / "run"
    is_last = False
    while not is_last:
        is_last = counts.kills >= num_kills
        before, left_over = losses_in(run_folder), being_written(run_folder)
        run = Run(arguments, run_folder, num_ranks)
        status = run.wait(None if is_last else rng.uniform(0.1, 1.1) * duration)
        while counts.kills % 2 and status is None and not being_written(run_folder) - left_over:
            status = run.wait(0.001)
        if status is None:
            run.kill()
            counts.kills += 1
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
            shutil.rmtree(run_folder)
    return counts


def being_written(output_dir: Path) -> set[tuple[str, int]]:
    """Returns temporary folders of checkpoints and exports, each with its inode."""
    found = set()
    for path in output_dir.glob("*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def exported_files(output_dir: Path) -> dict[str, int]:
    """Returns the CRC-32 of each exported file."""
    return {
        str(path.relative_to(output_dir)): zlib.crc32(path.read_bytes())
        for pattern in ("epoch_*", "export_step_*")
        for folder in output_dir.glob(pattern)
        for path in folder.rglob("*")
        if path.is_file()
    }


def losses_in(output_dir: Path) -> dict[int, list[str]]:
    """Returns all losses in DiskLogger's log by update step, as printed; a repeated step has several."""
    found: dict[int, list[str]] = {}
    for path in sorted(output_dir.glob("logs/*.txt")):
        logged = re.findall(r"Step (\d+) \| (?:.* )?loss:(\S+) .*\n", path.read_text())
        for step, loss in logged:
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


class Run:
    """A training whose ranks are forks of the server of `distributed_runs`."""

    def __init__(self, arguments: list[str], output_dir: Path, num_ranks: int) -> None:
        self.output_dir = output_dir
        output_dir.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = [*arguments, *logging_to(output_dir)]
        self.ranks = []
        for rank in range(num_ranks):
            given = (arguments, str(output_dir / "output.txt"), rank, num_ranks, port)
            self.ranks.append(fork_context.Process(target=_train, args=given))
            self.ranks[-1].start()

    def wait(self, timeout_seconds: float | None) -> int | None:
        """Returns the largest exit code; None if the training still runs after the time."""
        wait([rank.sentinel for rank in self.ranks], timeout_seconds)
        if not any(rank.exitcode is not None for rank in self.ranks):
            return None
        for rank in self.ranks:
            rank.join()
        return max(abs(rank.exitcode or 0) for rank in self.ranks)

    def kill(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # its DataLoader workers, too
            rank.kill()  # if it has no process group yet
            rank.join()

    def output(self) -> str:
        return (self.output_dir / "output.txt").read_text()


def _train(arguments: list[str], output: str, rank: int, num_ranks: int, port: int) -> None:
    """Runs the recipe's main program as `tune run` or torchrun do."""
    become_program([recipe_file(arguments[0]), *arguments[1:]], output)
    if num_ranks > 1:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        values = map(str, (rank, rank, num_ranks, num_ranks, port))
        os.environ.update(zip(names, values, strict=True), MASTER_ADDR="127.0.0.1")
    runpy.run_path(sys.argv[0], run_name="__main__")
