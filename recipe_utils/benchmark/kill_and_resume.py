"""Kills a training at random moments, resumes it, and compares it with a run that is left alone.

    python -m recipe_utils.benchmark.kill_and_resume --minutes 30
    python -m recipe_utils.benchmark.kill_and_resume --kills 20 --nproc_per_node 2 max_steps_per_epoch=12 save_every_n_steps=2

Every process of the training gets a SIGKILL, wherever it is: loading, computing, staging or writing a
checkpoint, exporting. Every second kill waits for the next moment at which something is being written. In the
same layout each loss and every exported file, those of the final weights included, must be bitwise those of the
undisturbed run: after each kill what is exported by then, at a training's end all. Trainings that get to their end
are started anew, and the last one gets there. Exits with 1 if a loss or a file differs or a step is lost.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

TUNE = str(Path(sys.executable).with_name("tune"))


def main() -> int:
    """Prints the figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="full_finetune_update_step")
    parser.add_argument("--config", default="llama3_2/5M_full_update_step")
    parser.add_argument("--nproc_per_node", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, help="go on for so long, whatever --kills says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill_and_resume_"))
    started = time.monotonic()

    reference = Run(args, folder / "reference")
    begin = time.monotonic()
    if reference.wait(timeout_seconds=None) != 0:
        print(reference.output()[-3000:])
        return 1
    duration = time.monotonic() - begin
    expected = reference.losses()
    expected_files = exported_files(reference.output_dir)
    print(
        f"undisturbed: {len(expected)} update steps in {duration:.0f} s, {len(expected_files)} exported files",
        flush=True,
    )

    kills = kills_in_writing = resumes = trainings = computed = differing = lost = 0
    files = files_differing = 0
    run_folder = folder / "run_0"
    is_last = False
    while not is_last:
        # The last run is left alone, so that what was killed last is compared to its end, too.
        is_last = (
            time.monotonic() - started > 60 * args.minutes if args.minutes else kills >= args.kills
        )
        resuming = any(run_folder.glob("step_*"))
        before = Run.losses_in(run_folder)
        left_over = being_written(run_folder)
        run = Run(args, run_folder)
        status = run.wait(None if is_last else rng.uniform(0.1, 1.1) * duration)
        if kills % 2:
            while status is None and not being_written(run_folder) - left_over:
                status = run.wait(timeout_seconds=0.001)
        if status is None:
            run.kill()
            kills += 1
            kills_in_writing += bool(being_written(run_folder) - left_over)
        elif status != 0:
            print(run.output()[-3000:])
            return 1
        resumes += resuming
        logged = Run.losses_in(run_folder)
        computed += sum(map(len, logged.values())) - sum(map(len, before.values()))
        differing += sum(
            loss != expected.get(step) for step, losses in logged.items() for loss in losses
        ) - sum(loss != expected.get(step) for step, losses in before.items() for loss in losses)
        exported = exported_files(run_folder)
        files += len(exported)
        files_differing += sum(expected_files.get(name) != crc for name, crc in exported.items())
        if status == 0:
            files_differing += len(expected_files.keys() - exported.keys())
            lost += len(expected.keys() - logged.keys())
            trainings += 1
            shutil.rmtree(run_folder)
            run_folder = folder / f"run_{trainings}"
        print(
            f"{(time.monotonic() - started) / 60:.1f} min: {kills} kills, {kills_in_writing} of them in "
            f"writing, {resumes} resumes, {trainings} trainings ended, {computed} update steps, {lost} lost, "
            f"{differing} losses differ, {files} files compared, {files_differing} differ",
            flush=True,
        )
    shutil.rmtree(folder)
    return 1 if differing or lost or files_differing else 0


def being_written(output_dir: Path) -> set[tuple[str, int]]:
    """Temporary folders of checkpoints and exports, each with what tells it from an earlier one."""
    found = set()
    for path in output_dir.glob("*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def exported_files(output_dir: Path) -> dict[str, int]:
    """The CRC-32 of each file of the models that are exported there."""
    return {
        str(path.relative_to(output_dir)): zlib.crc32(path.read_bytes())
        for pattern in ("epoch_*", "export_step_*")
        for folder in output_dir.glob(pattern)
        for path in folder.rglob("*")
        if path.is_file()
    }


class Run:
    """A training in processes of its own."""

    def __init__(self, args: argparse.Namespace, output_dir: Path) -> None:
        self.output_dir = output_dir
        output_dir.mkdir(parents=True, exist_ok=True)
        self._log_path = output_dir / "output.txt"
        launcher = [f"--nproc_per_node={args.nproc_per_node}"] if args.nproc_per_node > 1 else []
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [TUNE, "run", *launcher, args.recipe, "--config", args.config,
                 "save_every_n_steps=2", "export_every_n_steps=3", *args.overrides, f"output_dir={output_dir}",
                 "metric_logger._component_=torchtune.training.metric_logging.DiskLogger",
                 f"metric_logger.log_dir={output_dir}/logs", "log_every_n_steps=1",
                 "resume_from_checkpoint=auto"],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def wait(self, timeout_seconds: float | None) -> int | None:
        """Its exit status; None if it still runs after the time."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kills it and all that it has started, at once."""
        for pid in [self._process.pid, *descendants(self._process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def output(self) -> str:
        """What it has printed."""
        return self._log_path.read_text(errors="replace")

    def losses(self) -> dict[int, str]:
        """The last loss that was logged for each update step."""
        return {step: losses[-1] for step, losses in self.losses_in(self.output_dir).items()}

    @staticmethod
    def losses_in(output_dir: Path) -> dict[int, list[str]]:
        """Every loss that any run there has logged, by update step, as printed."""
        found: dict[int, list[str]] = {}
        for path in sorted(output_dir.glob("logs/*.txt")):
            for step, loss in re.findall(r"Step (\d+) \| loss:(\S+) .*\n", path.read_text()):
                found.setdefault(int(step), []).append(loss)
        return found


def descendants(pid: int) -> list[int]:
    """Processes that ``pid`` has started, and theirs; a launcher's workers have sessions of their own."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        of_parent = children.get(waiting.pop(), [])
        found += of_parent
        waiting += of_parent
    return found


if __name__ == "__main__":
    sys.exit(main())
