"""``tune run`` and other programs of this Python, without the seconds that importing PyTorch takes.

:class:`Popen` is used as :class:`subprocess.Popen`, and :func:`tune` as a shell's ``tune``. The process
they start is a child like any other, with a pid, signals, an exit code, file descriptors, a folder and an
environment of its own. Only it comes from a fork of a process that has the imports already, instead of
from ``exec``. What it starts that way in turn does, too: torchrun its ranks, the benchmark its peers.

What such a process does not have of one that ``exec`` made: a hash seed of its own, a command line in
``/proc``, and the interpreter's last steps, in which objects that are left are destroyed. The tests that
say "cold" in their docstring start real ones.

How a fork becomes the child of another process than the one that forked: the starter forks a process that
forks the program and ends, which makes the program an orphan, and orphans go to the nearest ancestor that
has asked for them.
"""

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import itertools
import json
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver, process, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

TUNE = str(Path(sys.executable).with_name("tune"))
STARTER = "warm-starter"
"""The name by which ``ps`` shows the processes that only fork others."""

_MAX_REQUEST_BYTES = 1 << 17  # the environment is most of it
_FIRST_OWN = 200  # descriptor; below it are those whose numbers a program is told
_cold_execute_child = subprocess.Popen._execute_child
_lock = threading.Lock()
_starter: socket.socket | None = None
_preloaded: list[str] = []
_kept: list[Any] = []


@dataclass
class Program:
    """What a starter is asked for."""

    kind: str
    """``script``, ``-m`` or ``-c``."""
    target: str
    argv: list[str]
    options: list[str]
    """Of the interpreter, ``-u`` and ``-P``."""
    environment: dict[str, str]
    cwd: str
    descriptors: list[int]
    """The numbers that the descriptors sent along have in the program."""
    has_own_session: bool
    parent: int
    deadline: float
    """By which it has its parent."""


def tune(
    *arguments: Any, cwd: Any = None, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """What ``tune`` printed with these arguments, and its exit code."""
    return _completed([TUNE, *arguments], cwd, env, timeout)


def python(
    *arguments: Any, cwd: Any = None, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """The same of this Python: ``-m`` and a module, ``-c`` and a program, or a file, and arguments."""
    return _completed([sys.executable, *arguments], cwd, env, timeout)


def _completed(
    command: list[Any], cwd: Any, env: dict[str, str] | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    with Popen(
        list(map(str, command)),
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            printed, said = running.communicate(timeout=timeout)
        except BaseException:
            running.kill()
            raise
    return subprocess.CompletedProcess(running.args, running.returncode, printed, said)


def cold_tune(*arguments: Any, cwd: Any = None) -> subprocess.CompletedProcess[str]:
    """The same from ``exec``."""
    return subprocess.run(
        [TUNE, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def preload(*modules: str) -> None:
    """Lets the programs that are started from now on have these modules imported besides, and no others."""
    global _starter
    _preloaded[:] = modules
    _starter = None  # the next program starts another, and the one that nobody can ask ends


def children_of(pid: int) -> list[int]:
    """The processes that another has started, without the one that forks them."""
    listed = subprocess.run(
        ["ps", "--ppid", str(pid), "-o", "pid=,comm="], capture_output=True, text=True, check=False
    )
    found = [line.split() for line in listed.stdout.splitlines()]
    return [int(child) for child, name, *_ in found if name != STARTER]


def _execute_child(self: Any, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
    """What :class:`subprocess.Popen` does it with; other programs than this Python's go its way."""
    _, pass_fds, cwd, env, _, _, shell, *pipes = rest[:13]
    env = dict(os.environ if env is None else env)
    known = None if shell or preexec_fn else _as_program(list(map(os.fspath, args)))
    if known is None or env.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        _cold_execute_child(self, args, executable, preexec_fn, *rest)
        return
    child_ends = (pipes[0], pipes[3], pipes[5])
    sent = [own if end == -1 else end for own, end in enumerate(child_ends)] + sorted(pass_fds)
    program = Program(
        *known,
        environment=env,
        cwd=os.path.abspath(cwd or "."),
        descriptors=[0, 1, 2, *sorted(pass_fds)],
        has_own_session=rest[-2],
        parent=os.getpid(),
        deadline=time.monotonic() + 60,
    )
    with _lock:
        starter = _own_starter()
        _adopt_orphans(True)
        try:
            socket.send_fds(starter, [pickle.dumps(program)], sent)
            self.pid = int(starter.recv(64))
            for _ in ("it is an orphan", "it is as after exec, with the session it was to have"):
                starter.recv(64)
        finally:
            # Not longer, for the orphans of a program are nothing that its tests look after.
            _adopt_orphans(False)
    self._child_created = True
    self._close_pipe_fds(*pipes)


class Popen(subprocess.Popen[str]):
    """A process, warm if it is this Python or ``tune``."""

    if sys.platform == "linux":  # where orphans can be asked for
        _execute_child = _execute_child


def _as_program(args: list[str]) -> tuple[str, str, list[str], list[str]] | None:
    """Kind, target, arguments and options; None of another program."""
    if args[0] == TUNE:
        return "script", TUNE, args, []
    if args[0] != sys.executable:
        return None
    options = list(itertools.takewhile({"-u", "-P"}.__contains__, args[1:]))
    rest = args[1 + len(options) :]
    if rest[:1] in (["-m"], ["-c"]):
        return rest[0], rest[1], [rest[0], *rest[2:]], options
    if rest and not rest[0].startswith("-"):
        return "script", rest[0], rest, options
    return None


def _adopt_orphans(is_on: bool) -> None:
    set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_child_subreaper, int(is_on), 0, 0, 0)


def _own_starter() -> socket.socket:
    """The test session's is a child of the fork server; a warm program has got its own at its start."""
    global _starter
    if _starter is None:
        from distributed_runs import fork_context

        _starter, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started = fork_context.Process(target=_serve_first, args=(theirs, _preloaded), daemon=True)
        started.start()
        _kept.append(started)
        theirs.close()
    return _starter


# ---- In a starter ----------------------------------------------------------------------------------


def _serve_first(requests: socket.socket, modules: list[str]) -> None:
    for module in modules:
        with contextlib.suppress(ImportError):  # for those who use it to report
            importlib.import_module(module)
    asked = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    own_path = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
    _serve(requests, own_path)


def _serve(requests: socket.socket, own_path: list[str]) -> NoReturn:
    """Starts a program per request, until nobody is left who could ask."""
    Path("/proc/self/comm").write_text(STARTER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a test session's end is that of its requests
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 64)
        if not request:
            os._exit(0)
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                _become(pickle.loads(request), descriptors, own_path, requests)
            requests.send(str(pid).encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        requests.send(b"adopted")


# ---- In a program ----------------------------------------------------------------------------------


def _become(
    program: Program, descriptors: list[int], own_path: list[str], requests: socket.socket
) -> NoReturn:
    """Makes of this fork what ``exec`` would have made, runs the program and ends."""
    global _starter, _lock
    starter_pid = 0
    try:
        while os.getppid() != program.parent:
            time.sleep(0.001)
            if time.monotonic() > program.deadline:
                os._exit(70)  # who asked for it has been killed meanwhile
        Path("/proc/self/comm").write_text(Path(program.argv[0]).name)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if program.has_own_session:
            os.setsid()
        requests = _moved_up(requests)
        _starter, theirs = map(_moved_up, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        starter_pid = os.fork()
        if starter_pid == 0:
            # As objects, too: one that is left would later close what has its number by then.
            requests.close()
            _starter.close()
            _close_all_but({0, 1, 2, theirs.fileno()})
            _serve(theirs, own_path)
        _lock = threading.Lock()
        subprocess.Popen._execute_child = _execute_child
        _take(program, descriptors, own_path, {requests.fileno(), _starter.fileno()})
        requests.send(b"ready")
        requests.close()
    except BaseException:
        traceback.print_exc()
        requests.send(b"failed")
        os._exit(70)
    code = _run(program)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(starter_pid, signal.SIGKILL)
        os.waitpid(starter_pid, 0)
    os._exit(code)


def _take(
    program: Program, descriptors: list[int], own_path: list[str], own_descriptors: set[int]
) -> None:
    import numpy as np
    import torch

    # First to where no number is wanted, for the wanted ones may be taken by others of them.
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, _FIRST_OWN) for each in descriptors]
    for number, each in zip(program.descriptors, moved, strict=True):
        os.dup2(each, number)
    _close_all_but({*program.descriptors, *own_descriptors})
    _kept.append(sys.stdin)  # would close the new one's descriptor
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(
            write_through="-u" in program.options, line_buffering=stream is sys.stderr
        )
    os.chdir(program.cwd)
    os.environ.clear()
    os.environ.update(program.environment)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    np.random.seed()

    # The fork server's children are multiprocessing's; this is a process of its own.
    process._parent_process, process._children = None, set()
    own = process.current_process()
    own._identity, own._name, own._parent_pid, own._popen = (), "MainProcess", None, None
    own._config = {"authkey": own._config["authkey"], "semprefix": "/mp"}
    multiprocessing.set_start_method(None, force=True)
    resource_tracker._resource_tracker.__init__()
    forkserver._forkserver.__init__()

    first = {"script": os.path.dirname(os.path.realpath(program.target)), "-m": program.cwd}
    own_first = [] if "-P" in program.options else [first.get(program.kind, "")]
    sys.path[:] = [*own_first, *own_path]
    sys.argv[:] = program.argv
    if program.target == TUNE:
        from recipe_utils.tune.registry import register

        register()  # what `import torch` does there


def _moved_up(own: socket.socket) -> socket.socket:
    with own:
        return socket.socket(fileno=fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN))


def _close_all_but(kept: set[int]) -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)


def _run(program: Program) -> int:
    """Runs it as the interpreter runs its main program; the exit code."""
    code: Any = None
    try:
        if program.kind == "script":
            runpy.run_path(program.target, run_name="__main__")
        elif program.kind == "-m":
            runpy._run_module_as_main(program.target)
        else:
            exec(program.target, sys.modules["__main__"].__dict__)
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    return (code or 0) & 0xFF
