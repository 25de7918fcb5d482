"""Files that a config's components make on first use, and anew once they would make other ones."""

import fcntl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def build_once(
    path: Path, build: Callable[[], None], is_current: Callable[[], bool] = lambda: True
) -> None:
    """Calls ``build`` unless ``path`` exists and is current; processes of one machine wait for each other.

    Where nothing is to be built nothing is locked or written: the folder may be read-only, or an export.

    Args:
        path: of the file that ``build`` makes.
        build: replaces what is there and is not current.
        is_current: whether the file is what would be built now; only asked where it exists.
    """

    def is_built() -> bool:
        return path.exists() and is_current()

    if is_built():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_built():
            build()


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes under another name and renames, so that ``path`` is whole or not there."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    unfinished.rename(path)


def changes(made_from: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What a file would be made from now and was not, such as ``model.num_heads is 4 and was 8``.

    Args:
        made_from: argument -> value when it was made; those that are not known are missing.
        now: likewise, all of them.

    Returns:
        All changes; empty if there are none.
    """
    return ", ".join(
        f"{argument} is {now.get(argument)} and was {value}"
        for argument, value in made_from.items()
        if now.get(argument) != value
    )
