"""Files that components build on first use, and rebuild if their arguments change."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock


def build_once(
    path: Path, build: Callable[[], object], is_current: Callable[[], bool] = lambda: True
) -> None:
    """Calls ``build`` unless ``path`` exists and is current, under a lock between processes.

    If nothing is built, nothing is locked or written: the folder may be read-only, or an export.

    Args:
        path: file that ``build`` writes.
        build: replaces the file.
        is_current: returns False if the file must be rebuilt; called only if it exists.
    """

    def is_built() -> bool:
        return path.exists() and is_current()

    if is_built():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        if not is_built():
            build()


def changes(made_from: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns the changed arguments, such as ``model.num_heads is 4 and was 8``, or an empty string."""
    return ", ".join(
        f"{argument} is {now.get(argument)} and was {value}"
        for argument, value in made_from.items()
        if now.get(argument) != value
    )
