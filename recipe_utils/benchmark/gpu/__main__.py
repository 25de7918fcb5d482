"""Checks and measures on one GPU all that a CPU cannot show, in at most ten minutes.

    python -m recipe_utils.benchmark.gpu --out /tmp/gpu
    python -m recipe_utils.benchmark.gpu --stages 0,2,8
    python -m recipe_utils.benchmark.gpu --device cpu --small      # the same code, in tiny shapes

Needs no file and no network: weights are made in place. Each stage stands alone; what it finds, or the traceback
that it ends with, is in FOLDER/results.json as soon as it has ended, and a table comes last, in FOLDER/results.md,
too. Exits with 1 if a stage raised or a check failed.
"""

import argparse
import json
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchtune.utils import get_logger

from recipe_utils.benchmark.gpu.attention import attention, compilations
from recipe_utils.benchmark.gpu.copies import copies
from recipe_utils.benchmark.gpu.machine import machine, process_group
from recipe_utils.benchmark.gpu.measure import Result, Settings
from recipe_utils.benchmark.gpu.speed import beyond_bf16, speed
from recipe_utils.benchmark.gpu.table import failures, markdown
from recipe_utils.benchmark.gpu.training import as_on_a_cpu, checkpoints, waits, weights_moved
from recipe_utils.files import write_atomically

_GRACE = 1.5
"""Times its seconds after which a stage that does not look at the clock is ended."""


class Stage(NamedTuple):
    """One of the command's."""

    run: Callable[[Settings], Result]
    seconds: float
    """That it may take; what it leaves is the others'."""


STAGES: Mapping[str, Stage] = {
    "0 machine": Stage(machine, 20),
    "1 process group": Stage(process_group, 15),
    "2 as on a CPU": Stage(as_on_a_cpu, 60),
    "3 attention": Stage(attention, 40),
    "4 host waits": Stage(waits, 15),
    "5 compilations": Stage(compilations, 40),
    "6 copies, FSDP2": Stage(copies, 25),
    "7 checkpoints": Stage(checkpoints, 60),
    "8 speed": Stage(speed, 240),
    "9 weights moved": Stage(weights_moved, 45),
    "10 beyond bf16": Stage(beyond_bf16, 40),
}
"""In their order. Together they may take 600 seconds."""


def main(arguments: Sequence[str] | None = None, stages: Mapping[str, Stage] = STAGES) -> int:
    """Runs the stages and prints the table; returns the exit status.

    Args:
        arguments: of the command line; None takes the process's own.
        stages: name, which begins with its number -> what to run.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_results"), help="folder of the results"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes and few steps")
    parser.add_argument("--stages", help="numbers, with commas between; all by default")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all stages together")
    args = parser.parse_args(arguments)
    numbers = {name.split()[0]: name for name in stages}
    asked = args.stages.split(",") if args.stages else list(numbers)
    if unknown := [number for number in asked if number not in numbers]:
        parser.error(f"--stages: there is no {', '.join(unknown)}; there are {', '.join(numbers)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: PyTorch finds none; for the same code on a CPU: --device cpu --small"
        )

    args.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="gpu_benchmark_"))
    settings = Settings(torch.device(args.device), args.small, scratch)
    try:
        with _environment(settings):
            results = run(
                {name: stages[name] for number, name in numbers.items() if number in asked},
                settings,
                60 * args.minutes,
                args.out,
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    table = markdown(results)
    write_atomically(args.out / "results.md", f"{table}\n".encode())
    print(table)
    return 1 if failures(results) else 0


def run(
    stages: Mapping[str, Stage], settings: Settings, seconds: float, folder: Path
) -> dict[str, Any]:
    """Runs stages in their order, each whatever became of those before; rewrites the results after each.

    Args:
        stages: by name.
        settings: of all.
        seconds: for all together. A stage that begins later is skipped by name.
        folder: of ``results.json``.
    """
    is_cuda = settings.is_cuda
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(settings.device) if is_cuda else "CPU",
        "torch": torch.__version__,
        "is_small": settings.is_small,
        "stages": {},
    }
    end = time.monotonic() + seconds
    for name, stage in stages.items():
        start, host_start = time.monotonic(), time.process_time()
        limit = min(math.inf if settings.is_small else stage.seconds, end - start)
        print(f"stage {name} ...", file=sys.stderr, flush=True)
        found: Result
        if limit <= 0:
            found = {"skipped": "the time was used up"}
        else:
            try:
                with _ended_after(min(_GRACE * limit, end - start)):
                    found = stage.run(replace(settings, deadline=start + limit))
            except Exception:
                found = {"raised": traceback.format_exc()}
            if torch.distributed.is_initialized():  # of a stage that raised
                torch.distributed.destroy_process_group()
            found["seconds"] = time.monotonic() - start
            found["host_seconds"] = time.process_time() - host_start
        results["stages"][name] = found
        text = json.dumps(results, indent=1, default=str)
        write_atomically(folder / "results.json", text.encode())
    return results


@contextmanager
def _environment(settings: Settings) -> Iterator[None]:
    """Variables that stages need, and the log without what is no warning; as they were afterwards."""
    changes = {}
    if settings.is_small:
        changes["TORCH_COMPILE_BACKEND"] = "eager"  # inductor takes a minute
    if settings.is_cuda:  # one machine, perhaps without a network
        changes = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", **changes}
    before = {name: os.environ.get(name) for name in changes}
    level = get_logger().level
    for name, value in changes.items():
        os.environ.setdefault(name, value)
    get_logger().setLevel(logging.WARNING)
    try:
        yield
    finally:
        get_logger().setLevel(level)
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block once it has taken so long, unless it is deep in a kernel's call."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise TimeoutError(f"it was not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
