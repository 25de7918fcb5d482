"""Runs baselines in turns of one optimizer step, one baseline at a time.

Each baseline runs in separate processes. After each optimizer step its ranks report to the benchmark and block until
their next turn. The report is sent by an optimizer hook of PyTorch, without changes to a baseline's code. Between turns
SIGSTOP stops all threads, so that data loading and spinning OpenMP threads do not slow down other baselines.

The time of a step is measured from "go" to the end of the next optimizer step on the slowest rank,
by the benchmark's clock. It includes logging and fetching data.
"""

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from recipe_utils.benchmark.token_audit import FedTokens


@dataclass
class RankReport:
    """Report of one rank after an optimizer step."""

    num_positions: int
    """Positions computed since the last report, padding included."""
    fingerprint: int
    """Fingerprint of their tokens; see :func:`.token_audit.fingerprint`."""
    peak_memory_bytes: int
    losses: list[float]
    """Losses since the last report [nats per target token]. Recipes log after a step, so each is one turn late."""


class Gate:
    """Blocks a baseline's process after each optimizer step until the benchmark starts its next turn."""

    def __init__(self, pipe: Connection, fed_tokens: FedTokens, device: torch.device) -> None:
        self._pipe = pipe
        self._fed_tokens = fed_tokens
        self._device = device
        self._losses: list[float] = []
        self._is_finishing = False

    def install(self) -> None:
        """Ends a turn after each optimizer step from now on."""
        register_optimizer_step_post_hook(self._end_turn)
        LossLogger.gate = self

    def wait_for_turn(self) -> None:
        """Blocks until the next turn; exits if the benchmark has ended."""
        try:
            self._is_finishing = self._pipe.recv()
        except EOFError:
            os._exit(1)

    def add_loss(self, loss: float) -> None:
        """Adds the loss of a step. The loss of the last step ends the process."""
        self._losses.append(loss)
        if self._is_finishing:
            self._report()
            # Not an exception: trainers would save a checkpoint or clean up.
            os._exit(0)

    def _end_turn(self, *_: Any) -> None:
        if self._fed_tokens.are_none:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._report()
        self.wait_for_turn()

    def _report(self) -> None:
        counts = self._fed_tokens.read_and_restart()
        report = RankReport(*counts, peak_memory_bytes(self._device), self._losses)
        try:
            self._pipe.send(report)
        except BrokenPipeError:
            os._exit(1)
        self._losses = []


class LossLogger:
    """Metric logger of torchtune's interface that passes the loss of each step to the gate of its process.

    torchtune's divergence includes the teacher's entropy. An entropy that is logged separately is
    added with the weight ``kd_ratio`` of the divergence.
    """

    gate: Gate | None = None

    def __init__(self, kd_ratio: float = 0.0) -> None:
        self._kd_ratio = kd_ratio

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Passes on ``payload["loss"]``."""
        if LossLogger.gate is not None and "loss" in payload:
            entropy = self._kd_ratio * float(payload.get("teacher_entropy", 0.0))
            LossLogger.gate.add_loss(float(payload["loss"]) + entropy)

    def log(self, name: str, data: Any, step: int) -> None:
        """Passes on ``data`` if ``name`` is ``"loss"``."""
        self.log_dict({name: data}, step)

    def log_config(self, config: Any) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak of this process: allocated memory on CUDA, otherwise resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        # Not ru_maxrss, which Linux initializes with the size of the parent.
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class BaselineDiedError(RuntimeError):
    """Error if a process ended or timed out, with the last lines of its output."""


class Processes:
    """Ranks of a running baseline, with torchrun's environment.

    ``log_path`` contains ``{rank}``; ``timeout_seconds`` is the maximum wait for a message.
    """

    def __init__(self, name: str, spec_path: Path, num_ranks: int, log_path: Path, timeout_seconds: float) -> None:
        self.name = name
        self._timeout_seconds = timeout_seconds
        self._pipes: list[Connection] = []
        self._processes: list[Popen[bytes]] = []
        self._log_paths = [Path(str(log_path).format(rank=rank)) for rank in range(num_ranks)]
        log_path.parent.mkdir(parents=True, exist_ok=True)
        environments = _environments(num_ranks)
        # -P: the working directory must not come before the installed packages.
        command = [sys.executable, "-P", "-m", "recipe_utils.benchmark.baselines.worker", str(spec_path)]
        # A process group to signal; Ctrl-C does not reach it.
        options: dict[str, Any] = {"stdin": DEVNULL, "stderr": STDOUT, "start_new_session": True}
        try:
            for rank_log_path, env in zip(self._log_paths, environments, strict=True):
                ours, theirs = Pipe()
                with theirs, open(rank_log_path, "wb") as output:
                    self._pipes.append(ours)
                    pipe = theirs.fileno()
                    process = Popen([*command, str(pipe)], env=env, pass_fds=[pipe], stdout=output, **options)
                    self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    def take_turn(self) -> tuple[float, list[Any]]:
        """Runs the baseline until the end of its next optimizer step.

        Returns the time on the slowest rank [s] and the message of each rank. Raises BaselineDiedError if a rank ended
        without a message, or timed out.
        """
        started = time.perf_counter()
        self._go(is_finishing=False)
        deadline = time.monotonic() + self._timeout_seconds
        messages = [self._receive_from(rank, deadline) for rank in range(len(self._pipes))]
        seconds = time.perf_counter() - started
        self._signal_all(signal.SIGSTOP)
        return seconds, messages

    def finish(self) -> list[float]:
        """Ends the baseline after its last turn; returns rank 0's remaining losses."""
        self._go(is_finishing=True)
        losses = self._receive_from(0, time.monotonic() + self._timeout_seconds).losses
        self.kill()
        return losses

    def kill(self) -> None:
        """Kills the ranks and their children; can be called twice."""
        self._signal_all(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()

    def _go(self, is_finishing: bool) -> None:
        self._signal_all(signal.SIGCONT)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(is_finishing)
            except OSError:
                raise self._died(rank) from None

    def _signal_all(self, signal_number: signal.Signals) -> None:
        """Signals the ranks and their children, such as DataLoader workers."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal_number)

    def _receive_from(self, rank: int, deadline: float) -> Any:
        pipe, process = self._pipes[rank], self._processes[rank]
        while True:
            # Polled before the pipe, to receive messages sent before the end.
            has_ended = process.poll() is not None
            try:
                if pipe.poll(0 if has_ended else 0.5):
                    return pipe.recv()
            except (EOFError, OSError):
                raise self._died(rank) from None
            if has_ended:
                raise self._died(rank)
            if time.monotonic() > deadline:
                raise self._died(rank, f"sent nothing for {self._timeout_seconds:g} s")

    def _died(self, rank: int, what: str = "") -> BaselineDiedError:
        if not what:
            with contextlib.suppress(TimeoutExpired):
                self._processes[rank].wait(timeout=10)
            what = f"ended with exit code {self._processes[rank].returncode}"
        path = self._log_paths[rank]
        text = "\n".join(f"    {line}" for line in path.read_text(errors="replace").rstrip().splitlines()[-8:])
        return BaselineDiedError(f"{self.name}: rank {rank} {what}; the last lines of {path}:\n{text}")


def _environments(num_ranks: int) -> list[dict[str, str]]:
    """Returns the environment of each rank, as torchrun sets it."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
    common = {key: value for key, value in os.environ.items() if key not in launcher}
    if num_ranks == 1:
        return [common]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max((os.cpu_count() or 1) // num_ranks, 1)
    common = {"OMP_NUM_THREADS": str(threads), **common}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    return [common | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(num_ranks)]
