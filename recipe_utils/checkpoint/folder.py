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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from recipe_utils.files import CheckpointError, FileFacts, fsync_folder, publish, rename_away, write_atomically

T = TypeVar("T")

MARKER = "complete.json"

_STEP_FOLDER = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"(step_\d+|export|start_\w+)\.tmp|((step|epoch|export_step)_\d+|best)\.old\.tmp")
_READ_BYTES = 1 << 24
_MAX_JSON_BYTES = 1 << 28


@dataclass(frozen=True)
class Marker:
    """Content of ``complete.json``."""

    recipe: str
    global_step: int
    world_size: int
    files: dict[Annotated[str, Field(pattern=r"^[a-z]+(_\d{5})?\.(json|safetensors)$")], FileFacts]
    """All other files."""
    format: Literal["torchtune-update-step"] = "torchtune-update-step"
    version: Literal[1] = 1


# ---- Writing ------------------------------------------------------------------------------------


def publish_checkpoint(temporary: Path, final: Path, marker: Marker) -> None:
    """Writes the marker of a checkpoint, whose other files are complete, and renames its folder as :func:`publish`."""
    write_atomically(temporary / MARKER, json.dumps(asdict(marker), indent=1))
    publish(temporary, final)


def remove_leftovers(folder: Path) -> None:
    """Removes partially written and partially removed folders of a killed run.

    Only folders with a temporary name of a checkpoint, an export or the lock, directly inside ``folder``. A complete
    checkpoint or export that was about to be replaced by :func:`recipe_utils.files.publish` is renamed back.
    """
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


def move_to_backup(folder: Path, run_id: str) -> Path | None:
    """Moves the checkpoints of earlier runs, complete or not, to a subfolder named after the new run.

    A resume takes the checkpoint with the most update steps, which might otherwise be one of theirs. Returns the
    subfolder; None if there were no checkpoints or ``folder`` is missing. Raises OSError if a move fails.
    """
    paths = [path for _, path in _steps(folder)]
    if not paths:
        return None
    backup = folder / f"before_{run_id}"
    backup.mkdir()
    for path in paths:
        path.rename(backup / path.name)
    fsync_folder(folder)
    return backup


def remove_older(folder: Path, step: int, keep: int, recipe: str) -> None:
    """Removes complete checkpoints of ``recipe`` from before ``step``, except the newest ``keep - 1``.

    ``step`` is that of the checkpoint just written. Incomplete checkpoints and those of other
    recipes stay. Raises OSError if a checkpoint cannot be removed.
    """
    older = [path for other, path in _steps(folder) if other < step and check_whole(path, recipe) is None]
    for path in older[keep - 1 :]:
        # Partially removed under its own name, it would look like a checkpoint.
        shutil.rmtree(rename_away(path))


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Returns (step, path) of all folders named like checkpoints, newest first."""
    matches = [(_STEP_FOLDER.fullmatch(path.name), path) for path in folder.glob("step_*")]
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


# ---- Reading ------------------------------------------------------------------------------------


def find_newest_whole(
    folder: Path, recipe: str | None = None, older_than: Path | None = None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Finds the complete checkpoint (of ``recipe``, if given) with the most update steps.

    Returns its path, or None, and the newer ones that were skipped, each with a reason. Checks names and sizes of files
    only; :func:`check_checksums` reads every byte. ``folder`` may be missing. With ``older_than``, a checkpoint in
    ``folder``, only those of fewer update steps are considered.
    """
    skipped: list[tuple[Path, str]] = []
    paths = [path for _, path in _steps(folder)]
    for path in paths if older_than is None else paths[paths.index(older_than) + 1 :]:
        if (reason := check_whole(path, recipe)) is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def check_whole(path: Path, recipe: str | None = None) -> str | None:
    """Returns why a folder is not a complete checkpoint (of ``recipe``, if given); None if it is one."""
    try:
        marker = read_marker(path)
    except CheckpointError as error:
        return str(error)
    if recipe is not None and marker.recipe != recipe:
        return f"it is of recipe {marker.recipe}, this one is {recipe}"
    for name, facts in marker.files.items():
        try:
            num_bytes = (path / name).stat().st_size
        except OSError as error:
            return f"{name}: {os.strerror(error.errno or 0)}"
        if num_bytes != facts.num_bytes:
            return f"{name}: it has {num_bytes} bytes instead of {facts.num_bytes}"
    return None


def read_marker(path: Path) -> Marker:
    """Reads ``complete.json`` of a checkpoint. Raises CheckpointError if that fails."""
    return read_as(Marker, path / MARKER)


def check_checksums(path: Path, files: Mapping[str, FileFacts]) -> str | None:
    """Compares the CRC-32 of files with what was written. Returns the first problem, None if there is none."""
    for name, facts in files.items():
        crc32 = 0
        try:
            with (path / name).open("rb") as file:
                while content := file.read(_READ_BYTES):
                    crc32 = zlib.crc32(content, crc32)
        except OSError as error:
            return f"{path / name}: {os.strerror(error.errno or 0)}"
        if crc32 != facts.crc32:
            return f"{path / name}: its bytes are not those that were written (CRC-32)"
    return None


def read_as(content: type[T], path: Path) -> T:
    """Reads a JSON file as a dataclass, or as another type.

    Raises CheckpointError, naming the file and the first wrong value, if that fails.
    """
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # reading a pipe or a device might never end
            raise CheckpointError(f"{path}: it is no regular file")
        if facts.st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: it has {facts.st_size} bytes, no checkpoint writes as many")
        return TypeAdapter(content).validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or "content"
        raise CheckpointError(f"{path}: {key}={problem['input']!r:.40} is invalid ({problem['msg']})") from error
