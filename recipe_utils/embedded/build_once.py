"""Files that a config's components make on first use."""

import fcntl
from collections.abc import Callable
from pathlib import Path


def build_once(path: Path, build: Callable[[], None]) -> None:
    """Calls ``build`` unless ``path`` exists; processes of one machine wait for each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            build()


def write_whole(path: Path, text: str) -> None:
    """Writes under another name and renames, so that ``path`` is whole or not there."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)
