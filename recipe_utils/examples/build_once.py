"""Files that components build on first use, and rebuild if their arguments change."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, SoftFileLock

from recipe_utils.torchtune_names import logger

WEIGHTS = re.compile(r"(?!model\.safetensors$)[^.].*\.(safetensors|bin|pth?|gguf|index\.json)")
"""Names of files of weights and of their indices, other than that of fresh weights."""


def build_once(
    path: Path,
    build: Callable[[], object],
    made_from: Mapping[str, Any] | None = None,
    recorded: Callable[[], Mapping[str, Any] | None] = lambda: None,
    is_of_another_model: Callable[[Path], bool] = lambda _: False,
) -> None:
    """Calls ``build`` unless ``path`` exists and was built from the same arguments.

    One of several processes builds. If nothing is built, nothing is locked or written: the folder may be read-only, or
    an export. ``build`` writes ``path`` after all other files and the record of the arguments ``made_from``, so that a
    kill leaves no current file. ``recorded`` returns those of the existing file; None for one of another origin, which
    is not replaced. Raises ValueError instead of writing into a folder with a file that ``is_of_another_model``.
    """

    def changes() -> str:
        before, now = recorded() or {}, made_from or {}
        return ", ".join(
            f"{name} is {now.get(name)} and was {value}" for name, value in before.items() if now.get(name) != value
        )

    # In this order: another process may delete the file in between.
    if not changes() and path.exists():
        return
    if others := sorted(file.name for file in path.parent.glob("*") if is_of_another_model(file)):
        text = f"{path} would be built beside files of another model: {', '.join(others)}"
        raise ValueError(f"{text}; set an empty folder, or the checkpointer and tokenizer of that model")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    try:
        held = FileLock(lock, fallback_to_soft=False).acquire()
    except OSError:  # without locks; in a folder that cannot be written, this raises again
        held = SoftFileLock(lock.with_suffix(".soft_lock")).acquire()
    with held:
        changed = changes()
        if not changed and path.exists():
            return
        if changed:
            logger.info(f"{path} is rebuilt: {changed}")
        path.unlink(missing_ok=True)
        build()
