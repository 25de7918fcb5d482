"""Files of a step checkpoint: written atomically, and read without unpickling.

    FOLDER/step_40/
        rank_00000.safetensors ...   each rank's part of the tensors
        tensors.json                 the file of each part of each tensor
        optimizer.json  state.json   everything that is not a tensor
        complete.json                written last: names, sizes and checksums of the other files

A folder is written under a temporary name and then renamed, as exported models are. JSON and
safetensors contain only data, so an untrusted checkpoint cannot execute code.
"""

import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe_utils.files import CheckpointError, fsync_folder, write_atomically

FORMAT = "torchtune-update-step"
FORMAT_VERSION = 1
MARKER = "complete.json"

TEMPORARY_EXPORT = "export.tmp"
"""Temporary folder of a model that is being exported."""

_STEP_FOLDER = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"step_\d+\.tmp|export\.tmp|((step|epoch|export_step)_\d+|best)\.old\.tmp")
_FILE_NAME = re.compile(r"[a-z]+(_\d{5})?\.(json|safetensors)")
_READ_BYTES = 1 << 24
_MAX_JSON_BYTES = 1 << 28


# ---- Writing ------------------------------------------------------------------------------------


def step_folder(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint after ``step`` update steps."""
    return folder / f"step_{step}"


def temporary_folder(folder: Path, step: int) -> Path:
    """Returns the path of that checkpoint while it is being written."""
    return folder / f"step_{step}.tmp"


def publish(temporary: Path, final: Path, marker: Mapping[str, Any]) -> None:
    """Writes the marker and renames the folder, which makes it a checkpoint.

    All files of ``temporary`` must be written and synced. An existing ``final`` is replaced. If it
    raises OSError, nothing has changed outside of ``temporary``. For ``marker`` see
    :func:`read_marker`.
    """
    write_atomically(temporary / MARKER, json.dumps(marker, indent=1).encode())
    replace_folder(temporary, final)


def replace_folder(temporary: Path, final: Path) -> None:
    """Renames a synced folder; an existing folder of that name is replaced.

    After a kill at any moment :func:`remove_leftovers` leaves one of the two.

    If it raises OSError, nothing has changed.
    """
    replaced = None
    if final.exists():
        replaced = _rename_away(final)
    try:
        temporary.rename(final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    fsync_folder(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Removes partially written and partially removed folders of a killed run, and returns their paths.

    Only folders with a temporary name of this module, directly inside ``folder``. A complete
    checkpoint or export that was about to be replaced is renamed back.
    """
    removed = []
    for path in sorted(folder.glob("*.tmp")):
        if not _LEFTOVER.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        if path.name.endswith(".old.tmp"):
            final = path.with_name(path.name.split(".")[0])
            # Checkpoints are also renamed before removal, exports only once the new one is complete.
            is_whole = not _STEP_FOLDER.fullmatch(final.name) or check_whole(path) is None
            if is_whole and not final.exists():
                path.rename(final)
                continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    return removed


def move_to_backup(folder: Path, run_id: str) -> Path | None:
    """Moves the checkpoints of earlier runs, complete or not, to a subfolder named after the new run.

    A resume takes the checkpoint with the most update steps, which might otherwise be one of
    theirs. Returns the subfolder; None if there were no checkpoints or ``folder`` is missing.
    Raises OSError if a move fails.
    """
    paths = [path for _, path in _steps(folder)]
    if not paths:
        return None
    aside = folder / f"before_{run_id}"
    aside.mkdir()
    for path in paths:
        path.rename(aside / path.name)
    fsync_folder(folder)
    return aside


def remove_older(folder: Path, step: int, keep: int, recipe: str) -> None:
    """Removes complete checkpoints of ``recipe`` from before ``step``, except the newest ``keep - 1``.

    ``step`` is that of the checkpoint just written. Incomplete checkpoints and those of other
    recipes stay. Raises OSError if a checkpoint cannot be removed.
    """
    older = [
        path
        for other, path in _steps(folder)
        if other < step and check_whole(path, recipe=recipe) is None
    ]
    for path in older[keep - 1 :]:
        # Partially removed under its own name, it would look like a checkpoint.
        shutil.rmtree(_rename_away(path))


def _rename_away(path: Path) -> Path:
    away = path.with_name(path.name + ".old.tmp")
    shutil.rmtree(away, ignore_errors=True)
    return path.rename(away)


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Returns (step, path) of all folders named like checkpoints, newest first."""
    found = []
    for path in folder.glob("step_*"):
        match = _STEP_FOLDER.fullmatch(path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


# ---- Reading ------------------------------------------------------------------------------------


def find_newest_whole(
    folder: Path, recipe: str, older_than: Path | None = None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Finds the complete checkpoint of a recipe with the most update steps.

    Checks names and sizes of files only; :func:`check_checksums` reads every byte. ``folder`` may
    be missing. With ``older_than``, a checkpoint in ``folder``, only those of fewer update steps
    are considered.

    Returns:
        Its path, or None; and the newer checkpoints that were skipped, each with a reason.
    """
    skipped: list[tuple[Path, str]] = []
    paths = [path for _, path in _steps(folder)]
    if older_than is not None:
        paths = paths[paths.index(older_than) + 1 :]
    for path in paths:
        reason = check_whole(path, recipe=recipe)
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def check_whole(path: Path, recipe: str | None = None) -> str | None:
    """Returns why a folder is not a complete checkpoint (of ``recipe``, if given); None if it is one."""
    try:
        marker = read_marker(path)
    except CheckpointError as error:
        return str(error)
    if recipe is not None and marker["recipe"] != recipe:
        return f"it is of recipe {marker['recipe']}, this one is {recipe}"
    for name, (num_bytes, _) in marker["files"].items():
        try:
            actual = (path / name).stat().st_size
        except OSError as error:
            return f"{name}: {os.strerror(error.errno or 0)}"
        if actual != num_bytes:
            return f"{name}: it has {actual} bytes instead of {num_bytes}"
    return None


def read_marker(path: Path) -> dict[str, Any]:
    """Reads ``complete.json``.

    Returns:
        ``recipe``, ``global_step``, ``world_size``, and ``files``: name -> [bytes, CRC-32].

    Raises:
        CheckpointError: the file is missing, unreadable, or of another format.
    """
    marker = read_json(path / MARKER)
    if marker.get("format") != FORMAT:
        raise CheckpointError(f"{MARKER}: it is no checkpoint of {FORMAT}")
    if marker.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{MARKER}: format version {marker.get('version')}, this one reads {FORMAT_VERSION}"
        )
    files = marker.get("files")
    if (
        not isinstance(marker.get("recipe"), str)
        or not isinstance(marker.get("global_step"), int)
        or not isinstance(marker.get("world_size"), int)
        or not isinstance(files, dict)
        or not all(_FILE_NAME.fullmatch(name) for name in files)
        or not all(
            isinstance(facts, list) and len(facts) == 2 and all(isinstance(n, int) for n in facts)
            for facts in files.values()
        )
    ):
        raise CheckpointError(f"{MARKER}: it does not say what a checkpoint's does")
    return marker


def check_checksums(path: Path, names: list[str]) -> str | None:
    """Compares the CRC-32 of files with the marker's. Returns the first problem, None if there is none.

    Raises CheckpointError if the marker cannot be read; see :func:`read_marker`.
    """
    files = read_marker(path)["files"]
    for name in names:
        crc32 = 0
        try:
            with (path / name).open("rb") as file:
                while content := file.read(_READ_BYTES):
                    crc32 = zlib.crc32(content, crc32)
        except OSError as error:
            return f"{path / name}: {os.strerror(error.errno or 0)}"
        if crc32 != files[name][1]:
            return f"{path / name}: its bytes are not those that were written (CRC-32)"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises CheckpointError, naming the file, if that fails."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # reading a pipe or a device might never end
            raise CheckpointError(f"{path}: it is no regular file")
        if facts.st_size > _MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path}: it has {facts.st_size} bytes, no checkpoint writes as many"
            )
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: it is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: it holds a {type(content).__name__} instead of an object")
    return content
