"""Atomic writes of files and folders, and safetensors files."""

import errno
import json
import logging
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recipe_utils.torchtune_names import log_once

_SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _SAFETENSORS_DTYPES.items()}

_UNSUPPORTED = {
    errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EBADF, errno.EPERM, errno.EACCES,
}  # fmt: skip
"""Error numbers of filesystems (SMB, FUSE, gcsfuse) that do not support an operation; ENOSPC and EIO are failures."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that does not match what it is loaded into."""


class FileFacts(NamedTuple):
    """Size and checksum of a file."""

    num_bytes: int
    crc32: int


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in safetensors; raises CheckpointError if it has none."""
    if dtype not in _SAFETENSORS_DTYPES:
        raise CheckpointError(f"dtype={dtype}: safetensors does not support it")
    return _SAFETENSORS_DTYPES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a name in safetensors; raises CheckpointError if there is none."""
    if name not in _DTYPES:
        raise CheckpointError(f"{name} is no dtype")
    return _DTYPES[name]


def write_atomically(path: Path, content: bytes | str) -> FileFacts:
    """Writes a file that exists with all its content or not at all, also after a crash.

    Raises OSError with the path; an existing file is unchanged then.
    """
    return _write(path, [content.encode() if isinstance(content, str) else content])


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """Writes a safetensors file as :func:`write_atomically`, tensor by tensor.

    There is no second copy of all tensors in memory. Equal tensors give equal bytes.

    Raises:
        OSError: contains the path. An existing file is unchanged.
        CheckpointError: safetensors does not support a tensor's dtype.
    """
    # By descending item size, so that every offset is a multiple of the item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in names:
        end = begin + tensors[name].nbytes
        header[name] = {
            "dtype": dtype_name(tensors[name].dtype),
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for name in names:
            data: Any = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(data)

    return _write(path, parts())


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> FileFacts:
    """Writes a hidden file of its own and renames it. A killed writer leaves the hidden file."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    num_bytes = crc32 = 0
    try:
        with unfinished.open("wb") as file:
            for part in parts:
                file.write(part)
                num_bytes += len(part)
                crc32 = zlib.crc32(part, crc32)
            file.flush()
            with if_supported("fsync"):
                os.fsync(file.fileno())
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        # The error of a failed write does not contain the path.
        raise OSError(error.errno, error.strerror, str(path)) from error
    os.replace(unfinished, path)
    fsync_folder(path.parent)
    return FileFacts(num_bytes, crc32)


def fsync_folder(folder: Path) -> None:
    """Writes renames and new files within a folder, or the content of a file, to the disk."""
    with if_supported("fsync"):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Renames a synced folder; an existing ``final`` is replaced.

    After a kill at any moment :func:`recipe_utils.checkpoint.folder.remove_leftovers` leaves one of the two. If it
    raises OSError, nothing has changed outside of ``temporary``.
    """
    replaced = rename_away(final) if final.exists() else None
    try:
        temporary.rename(final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    fsync_folder(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def rename_away(path: Path) -> Path:
    """Renames a folder that will be removed to a temporary name, which it returns."""
    away = path.with_name(path.name + ".old.tmp")
    shutil.rmtree(away, ignore_errors=True)
    return path.rename(away)


@contextmanager
def if_supported(operation: str) -> Iterator[None]:
    """Warns once if the filesystem does not support ``operation``, without which files are complete as well."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        text = f"output_dir: its filesystem does not support {operation} ({error.strerror})"
        log_once(f"{text}; everything is written without it", logging.WARNING)


class TensorFile:
    """Safetensors file whose tensors can be read in parts.

    All methods raise CheckpointError if the file, which it names, cannot be read or lacks the tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: it is not a safetensors file ({error})") from error

    def names(self) -> list[str]:
        """Returns the names of the tensors."""
        return list(self._file.keys())

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        """Returns a tensor, or a part of it."""
        try:
            if not slices:  # safetensors cannot slice a scalar
                return self._file.get_tensor(name)
            return self._file.get_slice(name)[slices]
        except (OSError, SafetensorError, IndexError) as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read ({error})") from error
