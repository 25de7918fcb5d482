"""Lock of an output folder: one run at a time writes to it, and all of its ranks can."""

import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from recipe_utils.files import publish, write_atomically
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import ConfigError
from recipe_utils.training.log import Log
from recipe_utils.training.settings import RunSettings

LOCK_FILE, HOLDER_FILE = ".run.lock", ".run.txt"
_TRIES = 300


class LockedError(OSError):
    """Another process holds the lock. The message contains process, host and time."""


class FolderLock:
    """Lock of a folder until :meth:`release` or the end of the process, also if it is killed.

    Raises LockedError if another process holds it, OSError if the file system has no locks or is
    not writable.
    """

    def __init__(self, folder: Path) -> None:
        self._holder = folder / HOLDER_FILE
        self._lock = FileLock(folder / LOCK_FILE, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(blocking=False)
        except Timeout as error:
            is_known = self._holder.exists()  # not while it is written
            raise LockedError(self._holder.read_text() if is_known else "another process") from error
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._holder.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}")

    def release(self) -> None:
        """Releases the lock and removes its files."""
        self._holder.unlink(missing_ok=True)
        # A process that waits for the removed file retries with a new one.
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()


@contextmanager
def lock_folder(settings: RunSettings, ranks: Ranks, log: Log) -> Iterator[None]:
    """Creates ``output_dir``, locks it in the block, and tries there what a checkpoint needs.

    Raises ConfigError on all ranks if another run writes to it, folders cannot be renamed, or a rank has another one.
    """
    folder, problem = settings.output_dir, None
    name, host = f"start_{uuid.uuid4().hex}.tmp", f"{socket.gethostname()}:{folder.resolve()}"
    with ExitStack() as at_exit:
        if ranks.is_zero and (problem := _try_to_save(folder / name)) is None:
            try:
                at_exit.callback(FolderLock(folder).release)
            except LockedError as error:
                problem = f"another run writes to it ({error}); wait for its end, stop it, or set another folder"
            except OSError as error:  # no reason not to train
                log.warn(f"output_dir={folder}: it cannot be locked ({error}); run one at a time")
        problem, name, first_host = gather_objects((problem, name, host), ranks.cpu_group)[0]
        hosts = gather_objects(None if problem or _appears(folder / name) else host, ranks.cpu_group)
        shutil.rmtree(folder / name, ignore_errors=True)
        if lost := [f"rank {rank} ({host})" for rank, host in enumerate(hosts) if host]:
            lost_ranks = f"{', '.join(lost[:3])}{', ...' * (len(lost) > 3)}"
            problem = (
                f"{lost_ranks} cannot find what rank 0 ({first_host}) writes; set it to a folder that all nodes share"
            )
        if problem is not None:
            raise ConfigError(f"output_dir={folder}: {problem}")
        yield


def _try_to_save(trial: Path) -> str | None:
    """Makes a folder with a file, and renames it to ``trial`` as a save does. Returns the problem, None on success."""
    temporary = trial.with_name(f"{trial.stem}_.tmp")
    try:
        temporary.mkdir(parents=True)
        write_atomically(temporary / "file", "")
        publish(temporary, trial)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        text = f"a folder with a file cannot be made and renamed there ({error.strerror}), as each save does"
        return f"{text}; set it to a folder on a local disk or a shared filesystem such as NFS"
    return None


def _appears(trial: Path) -> bool:
    """Returns True once this rank sees a folder that rank 0 has made, False if it does not in 30 s."""
    for _ in range(_TRIES):
        if trial.is_dir():
            return True
        with suppress(OSError):  # NFS asks its server again, whatever it has cached
            trial.parent.mkdir(parents=True, exist_ok=True)
        time.sleep(0.1)
    return False
