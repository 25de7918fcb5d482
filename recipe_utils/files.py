"""Files that are written whole or not at all, and tensors in them that are read without unpickling."""

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _SAFETENSORS_DTYPES.items()}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that does not fit what it is loaded into."""


class FileFacts(NamedTuple):
    """What tells a whole file from a torn one."""

    num_bytes: int
    crc32: int


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in safetensors.

    Raises:
        CheckpointError: safetensors has none for it.
    """
    if dtype not in _SAFETENSORS_DTYPES:
        raise CheckpointError(f"dtype={dtype}: safetensors cannot hold it")
    return _SAFETENSORS_DTYPES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`."""
    if name not in _DTYPES:
        raise CheckpointError(f"{name} is no dtype")
    return _DTYPES[name]


def write_atomically(path: Path, content: bytes) -> FileFacts:
    """Writes a file that is there with all its content or not at all, whatever happens meanwhile.

    Args:
        path: replaced if it exists.
        content: of the file.

    Raises:
        OSError: it could not be written; names the file. Nothing is left of it.
    """
    temporary = path.with_name(path.name + ".tmp")
    facts = _write_synced(temporary, lambda file: file.write(content))
    os.replace(temporary, path)
    fsync_folder(path.parent)
    return facts


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """Writes a safetensors file tensor by tensor, without a second copy of all in memory.

    The same tensors give the same bytes.

    Args:
        path: replaced if it exists.
        tensors: by name, of any device.

    Raises:
        OSError: it could not be written; names the file. Nothing is left of it.
        CheckpointError: a tensor is of a dtype that safetensors has not.
    """
    # The widest first: every tensor then begins at a multiple of its item size.
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

    def write(file: "_Checksummed") -> None:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            data: Any = flat.view(torch.uint8).numpy()
            file.write(memoryview(data))

    return _write_synced(path, write)


def replace_with_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file that is there with all its content or not at all, whatever happens meanwhile.

    A killed writer leaves a hidden file beside it, whose name ends with ``.unfinished``.

    Args:
        path: replaced if it exists.
        tensors: by name, of any device.

    Raises:
        OSError: it could not be written; names the file. Nothing is left of it.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        write_tensors(unfinished, tensors)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    fsync_folder(path.parent)


class _Checksummed:
    """Counts and sums up what is written to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = self.crc32 = 0

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self.crc32 = zlib.crc32(content, self.crc32)
        self.num_bytes += len(content)


def _write_synced(path: Path, write: Callable[[_Checksummed], None]) -> FileFacts:
    try:
        with path.open("wb") as file:
            checksummed = _Checksummed(file)
            write(checksummed)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        # A failing write does not say of which file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    return FileFacts(checksummed.num_bytes, checksummed.crc32)


def fsync_folder(folder: Path) -> None:
    """Makes renames and new files within a folder outlive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """The same for everything in a folder, the content of files included."""
    for path in [*folder.rglob("*"), folder]:
        fsync_folder(path)


class TensorFile:
    """Reads parts of the tensors in a safetensors file.

    Args:
        path: of the file.

    Raises:
        CheckpointError: it cannot be read, or is something else; names the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(str(path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: it is no safetensors file ({error})") from error

    def names(self) -> list[str]:
        """Of the tensors in it."""
        return list(self._file.keys())

    def layout(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor, which is not read.

        Raises:
            CheckpointError: there is none of that name; names the file.
        """
        try:
            part = self._file.get_slice(name)
            return dtype_of(part.get_dtype()), tuple(part.get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read ({error})") from error

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or a part of it.

        Raises:
            CheckpointError: there is none of that name; names the file.
        """
        try:
            if not slices:  # safetensors cannot slice what has no dimension
                return self._file.get_tensor(name)
            return self._file.get_slice(name)[slices]
        except (OSError, SafetensorError, IndexError) as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read ({error})") from error
