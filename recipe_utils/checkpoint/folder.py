"""The files of a step checkpoint: written whole or not at all, and read without unpickling.

    FOLDER/step_40/
        rank_00000.safetensors ...   each rank's part of the tensors
        tensors.json                 which part of which tensor is in which file
        optimizer.json  state.json   everything that is no tensor
        complete.json                written last: the names, sizes and checksums of the others

A folder is made under a temporary name and gets its own by one rename, as exported models do. JSON and safetensors hold data
only, so nothing that a stranger has put there is ever executed.
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
"""Where a model is while it is being exported."""

_STEP_FOLDER = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"step_\d+\.tmp|export\.tmp|((step|epoch|export_step)_\d+|best)\.old\.tmp")
_FILE_NAME = re.compile(r"[a-z]+(_\d{5})?\.(json|safetensors)")
_READ_BYTES = 1 << 24
_MAX_JSON_BYTES = 1 << 28


# ---- Writing ------------------------------------------------------------------------------------


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` update steps is, or will be."""
    return folder / f"step_{step}"


def temporary_folder(folder: Path, step: int) -> Path:
    """Where that checkpoint is while it is being written."""
    return folder / f"step_{step}.tmp"


def publish(temporary: Path, final: Path, marker: Mapping[str, Any]) -> None:
    """Makes a written folder a checkpoint: its marker, then its name.

    Args:
        temporary: the folder, whose files are all written and synced.
        final: its name from now on; what is there already is replaced.
        marker: see :func:`check_whole`.

    Raises:
        OSError: nothing has changed but for ``temporary``.
    """
    write_atomically(temporary / MARKER, json.dumps(marker, indent=1).encode())
    replace_folder(temporary, final)


def replace_folder(temporary: Path, final: Path) -> None:
    """Gives a synced folder its name; what bears that name already goes.

    After a kill at any moment :func:`remove_leftovers` leaves the one or the other.

    Raises:
        OSError: nothing has changed.
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
    """Removes what a killed run has left half written or half removed.

    Only folders that bear a temporary name of this module, directly inside ``folder``. A whole
    checkpoint or export that was about to be replaced gets its name back.

    Returns:
        The folders that were removed.
    """
    removed = []
    for path in sorted(folder.glob("*.tmp")):
        if not _LEFTOVER.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        if path.name.endswith(".old.tmp"):
            final = path.with_name(path.name.split(".")[0])
            # Checkpoints are also renamed to be removed, exports only once the new one is there.
            is_whole = not _STEP_FOLDER.fullmatch(final.name) or check_whole(path) is None
            if is_whole and not final.exists():
                path.rename(final)
                continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    return removed


def move_to_backup(folder: Path, run_id: str) -> Path | None:
    """Moves the checkpoints of earlier runs, whole or not, where a new one does not meet them.

    Else they would be taken for its own: the newest is the one of most update steps.

    Args:
        folder: that the new run's will be in; may be missing.
        run_id: of the new run.

    Returns:
        Where they are now; None if there were none.

    Raises:
        OSError: they could not be moved.
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
    """Removes whole checkpoints of a recipe from before ``step``, but for the newest ``keep - 1``.

    The torn and the foreign ones stay: they are not this run's to judge.

    Args:
        folder: that holds the checkpoints.
        step: of the checkpoint that has just been written, which is kept.
        keep: at least 1.
        recipe: of the checkpoints.

    Raises:
        OSError: one could not be removed.
    """
    older = [
        path
        for other, path in _steps(folder)
        if other < step and check_whole(path, recipe=recipe) is None
    ]
    for path in older[keep - 1 :]:
        # Half removed under its own name, it would look like a checkpoint.
        shutil.rmtree(_rename_away(path))


def _rename_away(path: Path) -> Path:
    away = path.with_name(path.name + ".old.tmp")
    shutil.rmtree(away, ignore_errors=True)
    return path.rename(away)


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything that is named as a checkpoint, newest first."""
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
    """The checkpoint with the most update steps among the whole ones of a recipe.

    Whole is judged by names and sizes; :func:`check_checksums` reads every byte.

    Args:
        folder: may be missing.
        recipe: the name that the checkpoint was saved with.
        older_than: a checkpoint in ``folder``; only those of fewer update steps are looked at.

    Returns:
        Its path, or None if there is none; and the newer ones that were passed over, each with a
        reason.
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
    """Why a folder is no whole checkpoint of this format, and of ``recipe`` if given; None if it is."""
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
    """What ``complete.json`` says.

    Returns:
        ``recipe``, ``global_step``, ``world_size``, and ``files``: name -> [bytes, CRC-32].

    Raises:
        CheckpointError: it is missing, unreadable, or of another format.
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
    """Reads files of a checkpoint from end to end.

    Returns:
        What is wrong with the first one that is not what was written, None if all are.

    Raises:
        CheckpointError: no marker, see :func:`read_marker`.
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
    """A JSON object from a file.

    Raises:
        CheckpointError: it cannot be read, or holds something else; names the file.
    """
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # a pipe would be waited for, a device read for ever
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
