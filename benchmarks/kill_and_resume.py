"""Kills a training at random moments, resumes it, and compares every loss with a run left alone.

    python benchmarks/kill_and_resume.py --minutes 30
    python benchmarks/kill_and_resume.py --kills 20 --nproc_per_node 2 max_steps_per_epoch=12 save_every_n_steps=2

Every process of the training gets a SIGKILL, wherever it is: loading, computing, staging or writing a
checkpoint, exporting. In the same layout each loss must be bitwise that of the undisturbed run. Trainings that
get to their end are started anew. Exits with 1 if a loss differs or a step is lost.
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
from pathlib import Path

TUNE = str(Path(sys.executable).with_name("tune"))


def main() -> int:
    """Prints the figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
    print(f"undisturbed: {len(expected)} update steps in {duration:.0f} s", flush=True)

    kills = resumes = trainings = computed = differing = lost = 0
    run_folder = folder / "run_0"
    while time.monotonic() - started < 60 * args.minutes if args.minutes else kills < args.kills:
        resuming = any(run_folder.glob("step_*"))
        before = Run.losses_in(run_folder)
        run = Run(args, run_folder)
        status = run.wait(timeout_seconds=rng.uniform(0.1, 1.1) * duration)
        if status is None:
            run.kill()
            kills += 1
        elif status != 0:
            print(run.output()[-3000:])
            return 1
        resumes += resuming
        logged = Run.losses_in(run_folder)
        computed += sum(map(len, logged.values())) - sum(map(len, before.values()))
        differing += sum(
            loss != expected.get(step) for step, losses in logged.items() for loss in losses
        ) - sum(loss != expected.get(step) for step, losses in before.items() for loss in losses)
        if status == 0:
            lost += len(expected.keys() - logged.keys())
            trainings += 1
            shutil.rmtree(run_folder)
            run_folder = folder / f"run_{trainings}"
        print(
            f"{(time.monotonic() - started) / 60:.1f} min: {kills} kills, {resumes} resumes, "
            f"{trainings} trainings ended, {computed} update steps, {lost} lost, {differing} losses differ",
            flush=True,
        )
    shutil.rmtree(folder)
    return 1 if differing or lost else 0


class Run:
    """A training in processes of its own."""

    def __init__(self, args: argparse.Namespace, output_dir: Path) -> None:
        self.output_dir = output_dir
        output_dir.mkdir(parents=True, exist_ok=True)
        self._log_path = output_dir / "output.txt"
        launcher = [f"--nproc_per_node={args.nproc_per_node}"] if args.nproc_per_node > 1 else []
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [TUNE, "run", *launcher, "full_finetune_update_step", "--config", args.config,
                 "save_every_n_steps=2", *args.overrides, f"output_dir={output_dir}",
                 "metric_logger._component_=torchtune.training.metric_logging.DiskLogger",
                 f"metric_logger.log_dir={output_dir}/logs", "log_every_n_steps=1",
                 "resume_from_checkpoint=True"],
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
