"""Lock of an output folder: one run at a time writes to it."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import ConfigError
from recipe_utils.training.log import Log
from recipe_utils.training.settings import RunSettings

LOCK_FILE, HOLDER_FILE = ".run.lock", ".run.txt"


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
    """Creates ``output_dir`` and locks it in the block.

    Raises ConfigError on all ranks if another run writes to it.
    """
    folder, problem = settings.output_dir, None
    with ExitStack() as at_exit:
        if ranks.is_zero:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                at_exit.callback(FolderLock(folder).release)
            except LockedError as error:
                problem = f"another run writes to it ({error}); wait for its end, stop it, or set another folder"
            except OSError as error:
                if folder.is_dir():  # no reason not to train
                    log.warn(f"output_dir={folder}: it cannot be locked ({error}); run one at a time")
                else:
                    problem = f"it cannot be created ({error}); set another folder"
        problem = gather_objects(problem, ranks.cpu_group)[0]
        if problem is not None:
            raise ConfigError(f"output_dir={folder}: {problem}")
        yield
