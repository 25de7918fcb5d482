"""Runs a function on several processes with gloo, as an ordinary test.

A fork server imports torch, torchtune and the recipe once; each process forks from it in
milliseconds.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

fork_context = multiprocessing.get_context("forkserver")
fork_context.set_forkserver_preload(["warm"])


def start_fork_server() -> None:
    """Starts it without waiting for its imports; otherwise the first rank starts it."""
    forkserver.ensure_running()


class CrashedError(AssertionError):
    """A rank did not get as far as Python's errors."""


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120,
    expect_failures: bool = False,
) -> list[Any]:
    """Calls ``function(*args)`` on ``world_size`` ranks and returns what each returned.

    The launcher's variables (RANK, WORLD_SIZE, ...) are set as torchrun sets them. A rank that raises
    fails the test with its traceback; with ``expect_failures`` the result is the traceback instead.

    A crash in native code is tried once more, with a warning: once in several runs of all tests a thread of
    gloo's dies in malloc (torch 2.13; kernel: "pt_gloo_runloop: segfault at 0 ... in libc.so.6").
    """
    run = (function, world_size, args, timeout_seconds, expect_failures)
    try:
        return _run_once(*run)
    except CrashedError as error:
        warnings.warn(f"{error}; once more", stacklevel=2)
        return _run_once(*run)


def _run_once(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout_seconds: float,
    expect_failures: bool,
) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, pipes = [], []
    for rank in range(world_size):
        ours, theirs = fork_context.Pipe(duplex=False)
        process = fork_context.Process(
            target=_run_rank, args=(function, args, rank, world_size, port, timeout_seconds, theirs)
        )
        process.start()
        theirs.close()
        ranks.append(process)
        pipes.append(ours)

    results: dict[int, tuple[bool, Any]] = {}
    try:
        while len(results) < world_size:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(waiting, timeout=timeout_seconds)
            assert ready, f"rank(s) {set(range(world_size)) - set(results)} hang; got {results}"
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    how = _how_it_died(ranks[rank])
                    if how in ("SIGSEGV", "SIGBUS", "SIGABRT") and not expect_failures:
                        raise CrashedError(f"rank {rank} died of {how}") from None
                    results[rank] = (False, f"rank {rank} died of {how}")
                ok, value = results[rank]
                assert ok or expect_failures, f"rank {rank}:\n{value}"
        for process in ranks:
            process.join(timeout=timeout_seconds)
            assert process.exitcode is not None, "a rank has answered but does not end"
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    return [results[rank][1] for rank in range(world_size)]


def _how_it_died(rank: multiprocessing.process.BaseProcess) -> str:
    rank.join(timeout=10)
    code = rank.exitcode
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _run_rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    timeout_seconds: float,
    pipe: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    # Back to how a user's rank starts its data-loading processes; the fork server has set itself.
    multiprocessing.set_start_method(None, force=True)
    try:
        # Made here and not by the recipe, so that one launch can run several configs.
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
        result = function(*args)
        # Rank 0 holds the store by which the others find each other, so it leaves with them.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        # Plain pickles: tensors sent the usual way live in the sender's memory, which ends first.
        pipe.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise SystemExit(1) from None
