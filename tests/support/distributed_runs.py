"""Runs functions on ranks with gloo, as ordinary tests.

The ranks are forks of a server that has imported PyTorch, torchtune and the recipes. They stay alive from
test to test, like those of PyTorch's ``MultiProcContinuousTest``: each call gets a process group of its own,
and a call that fails ends the ranks, so that the next one starts new ones.
"""

import atexit
import contextlib
import functools
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import socket
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

fork_context = multiprocessing.get_context("forkserver")
fork_context.set_forkserver_preload(["warm"])
PATCHED = re.compile(r"(recipe_utils|tiny|recipe_runs)(\..*)?|torch|torch\.distributed|torchtune\.training")


def start_fork_server():
    """Starts it without waiting for its imports; otherwise the first rank starts it."""
    forkserver.ensure_running()


class CrashedError(AssertionError):
    """A rank died in native code."""


_ranks: list[tuple[BaseProcess, Connection]] = []


def run_distributed(function, world_size, *args, timeout_seconds=600, expect_failures=False):
    """Calls ``function(*args)`` on ``world_size`` ranks and returns what each returned.

    The launcher's variables (RANK, WORLD_SIZE, ...) are set as torchrun sets them. A rank that raises
    fails the test with its traceback; with ``expect_failures`` the result is the traceback instead.

    A crash in native code is tried once more, with a warning; tests/README.md has what is known of it.
    """
    call = (function, args, world_size, timeout_seconds, expect_failures)
    try:
        return _call_once(*call)
    except CrashedError as error:
        print(f"{error}; once more", file=sys.stderr)
        return _call_once(*call)


def _call_once(function, args, world_size, timeout_seconds, expect_failures):
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.socket() as free:  # for functions that make a process group themselves
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    while len(_ranks) < world_size:
        _start_rank()
    processes, pipes = zip(*_ranks[:world_size], strict=True)
    for_all = {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    results = {}
    try:
        for rank, pipe in enumerate(pipes):
            environment = {"RANK": rank, "LOCAL_RANK": rank, **for_all}
            call = (function, args, environment, store.port, timeout_seconds)
            pipe.send_bytes(pickle.dumps(call))
        while len(results) < world_size:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(waiting, timeout=timeout_seconds)
            assert ready, f"rank(s) {set(range(world_size)) - set(results)} hang; got {results}"
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    ok, value, was_restored = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    how = _how_it_died(processes[rank])
                    if how in ("SIGSEGV", "SIGBUS", "SIGABRT") and not expect_failures:
                        raise CrashedError(f"rank {rank} died of {how}") from None
                    ok, value, was_restored = False, f"rank {rank} died of {how}", False
                results[rank] = (value, ok and was_restored)
                assert ok or expect_failures, f"rank {rank}:\n{value}"
    finally:
        if len(results) < world_size or not all(reusable for _, reusable in results.values()):
            end_ranks()
    return [results[rank][0] for rank in range(world_size)]


def _start_rank():
    ours, theirs = fork_context.Pipe()
    process = fork_context.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()
    _ranks.append((process, ours))


@atexit.register
def end_ranks():
    """Ends all of them; the next call starts new ones."""
    for process, pipe in _ranks:
        process.kill()
        process.join()
        pipe.close()
    _ranks.clear()


def _how_it_died(rank):
    rank.join(timeout=10)
    code = rank.exitcode
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


# ---- In a rank -------------------------------------------------------------------------------------


def _serve(pipe):
    """Answers calls until the pipe is closed or a call fails."""
    # Back to how a user's rank starts its data-loading processes; the fork server has set itself.
    multiprocessing.set_start_method(None, force=True)
    with contextlib.suppress(EOFError):
        while True:
            call = pipe.recv_bytes()
            try:
                with _restored_state() as was_restored:
                    result = _answer(*pickle.loads(call))
                # Plain pickles: tensors sent the usual way live in the sender's memory, which ends first.
                answer = (True, result, was_restored())
            except BaseException:
                answer = (False, traceback.format_exc(), False)
            pipe.send_bytes(pickle.dumps(answer))
            if not answer[0]:
                break


def _answer(function, args, environment, store_port, timeout_seconds):
    import numpy as np
    import torch
    import torch.distributed as dist

    os.environ.update({name: str(value) for name, value in environment.items()})
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    timeout = timedelta(seconds=timeout_seconds)
    rank, world_size = environment["RANK"], environment["WORLD_SIZE"]
    store = dist.TCPStore("127.0.0.1", store_port, timeout=timeout)
    # Made here and not by the recipe, so that one call can run several configs.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    result = function(*args)
    with contextlib.suppress(RuntimeError, ValueError):
        dist.barrier()  # nobody leaves while others still read from it
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_meshes()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(timeout_seconds)
            assert not thread.is_alive(), f"{thread.name} does not end"
    return result


@contextlib.contextmanager
def _restored_state():
    """Restores what a call changes of its process; yields a function that returns if all of it could be.

    That is: environment, folder, signal handlers, soft limits, log handlers, PyTorch's global settings, and
    functions that were patched in the modules of :data:`PATCHED` and their classes.
    """
    import torch

    from recipe_utils.torchtune_names import LOGGERS

    environment, folder = dict(os.environ), os.getcwd()
    handlers = [(logger, list(logger.handlers), logger.level) for logger in LOGGERS]
    signals = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGXFSZ)}
    limits = {each: resource.getrlimit(each) for each in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)}
    functions = list(_functions())
    add_audit_hook, hooks = sys.addaudithook, []
    sys.addaudithook = lambda hook: (hooks.append(hook), add_audit_hook(hook))
    try:
        yield lambda: not hooks and all(resource.getrlimit(each) == limits[each] for each in limits)
    finally:
        sys.addaudithook = add_audit_hook
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        for logger, of_logger, level in handlers:
            logger.handlers[:] = of_logger
            logger.setLevel(level)
        logging.disable(logging.NOTSET)
        for each, handler in signals.items():
            signal.signal(each, handler)
        for each, (soft, hard) in limits.items():
            with contextlib.suppress(ValueError):
                resource.setrlimit(each, (soft, hard))
        for owner, name, function in functions:
            if vars(owner).get(name) is not function:
                setattr(owner, name, function)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch._dynamo.reset()
        gc.collect()


def _forget_meshes():
    """Clears DTensor's caches, whose entries keep the mesh of the call that they were made in.

    Threads of its gloo groups poll: with 36 old meshes, ranks spent 40 % of their time there.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            own = [each for each in vars(module).values() if issubclass(type(each), type)]
            for owner in itertools.chain([module], own):
                for cached in list(vars(owner).values()):
                    function = getattr(cached, "__func__", cached)
                    if isinstance(function, functools._lru_cache_wrapper):
                        function.cache_clear()


def _functions():
    """Functions of the modules that tests patch, and of their classes, with where they stand."""
    kinds = (type(_functions), classmethod, staticmethod, property, functools._lru_cache_wrapper)
    for module_name, module in list(sys.modules.items()):
        if PATCHED.fullmatch(module_name):
            own = [each for each in vars(module).values() if issubclass(type(each), type)]
            classes = [each for each in own if each.__module__ == module_name]
            for owner in itertools.chain([module], classes):
                for name, value in list(vars(owner).items()):
                    if type(value) in kinds:
                        yield owner, name, value
