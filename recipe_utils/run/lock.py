"""One run at a time writes to an output folder."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

LOCK_FILE = ".run.lock"


class LockedError(OSError):
    """Another process has the folder; the message says which."""


class FolderLock:
    """Held from its making to :meth:`release`, or to the end of the process, however it ends.

    The system's own lock (POSIX), which also holds between hosts that share the folder where their file system
    knows locks, and which forked processes do not inherit. The file only says who has it.

    Args:
        folder: is there.

    Raises:
        LockedError: names host, process and since when.
        OSError: the file system knows no locks, or cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        while True:
            self._file = self._path.open("a+")
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                with self._file:
                    raise LockedError(_holder(self._file)) from error
            except OSError:
                self._file.close()
                raise
            # Whoever had it may have removed the file since it was opened.
            if self._path.exists() and os.path.samestat(
                os.fstat(self._file.fileno()), self._path.stat()
            ):
                break
            self._file.close()
        self._file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        self._file.write(json.dumps(who))
        self._file.flush()

    def release(self) -> None:
        """Lets go, and removes the file."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def _holder(file: Any) -> str:
    file.seek(0)
    try:
        who = json.loads(file.read())
        return f"process {who['pid']} on {who['host']}, since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
