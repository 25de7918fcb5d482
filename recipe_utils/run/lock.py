"""Lock of an output folder: one run at a time writes to it."""

import os
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

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
            raise LockedError(
                self._holder.read_text() if is_known else "another process"
            ) from error
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._holder.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}")

    def release(self) -> None:
        """Releases the lock and removes its files."""
        self._holder.unlink(missing_ok=True)
        # A process that waits for the removed file retries with a new one.
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()
