r"""Rows of data files, read when they are needed.

Example: ``{"a": 1}\n\n{"a": 22}\n`` is scanned once. The scan stores the bounds [0, 10, 20] of its rows, the numbers
[1, 3] of their lines and a checksum. ``rows[1]`` reads the bytes 10 to 19, and returns {"a": 22}.
"""

import gzip
import json
import os
import shutil
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from recipe_utils.update_steps.samples import SampleError

_REFUSED = {
    b"BZh": "compressed by bzip2; unpack it with bzip2 -d",
    b"\xfd7zXZ\0": "compressed by xz; unpack it with xz -d",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it with zstd -d",
    b"\x04\x22\x4d\x18": "compressed by lz4; unpack it with lz4 -d",
    b"PK\x03\x04": "a zip archive (or an .xlsx or .npz file); unzip it",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"version https://git-lfs": "a pointer of Git LFS instead of the data; run git lfs pull",
    b"\xff\xfe": "UTF-16 or UTF-32; convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16; convert it with iconv -f UTF-16 -t UTF-8",
    b"ARROW1": "an Arrow file; set it to a folder written by save_to_disk",
    b"\xff\xff\xff\xff": "an Arrow file; set it to the folder of save_to_disk that contains it",
    b"<": "HTML or XML, such as the error page of a download",
}
"""First bytes of files that are not read, and what to do."""
_CHUNK = 1 << 22


class FileRows:
    """Rows of a file in JSON Lines, of one JSON array, of a parquet file, or of a ``save_to_disk`` folder.

    The first bytes determine the format, also of what gzip unpacks to a temporary file. Bounds of rows
    [n + 1] int64 are in memory, rows are not. Pickling copies no data.

    Args:
        path: a file, or a folder that ``datasets.Dataset.save_to_disk`` wrote.
        is_text: the file is one row, whose ``text`` it contains.

    Raises:
        ValueError: the file has another format or no rows; the error contains its format and what to do.
        OSError: ``path`` cannot be read.
    """

    _bounds: "array[int]"
    content_hash: str
    """Size and crc32 of all bytes of the data."""

    def __init__(self, path: str, is_text: bool = False) -> None:
        self.path, self._file, self._is_text = path, path, is_text
        self._numbers: array[int] | None = None
        """Numbers of the rows' lines, if some are blank."""
        self._table: Any = None
        if Path(path).is_dir():
            self._read_table([*self._saved_files()])
            return
        if not Path(path).is_file() and Path(path).exists():
            self._refuse("no regular file; write its content to one")
        # The first bytes tell the format; those of gzip, of what it unpacks.
        head = _head(path)
        if head.startswith(b"\x1f\x8b"):
            self._file = temporary_file(self)
            try:
                with gzip.open(path) as packed, open(self._file, "wb") as plain:
                    shutil.copyfileobj(packed, plain, _CHUNK)
            except (EOFError, OSError, zlib.error) as error:
                folder = tempfile.gettempdir()
                self._refuse(f"compressed, and cannot be unpacked to {folder} ({error})")
            head = _head(self._file)
        if head.startswith(b"PAR1"):
            self._read_table([self._file])
            return
        for magic, text in _REFUSED.items():
            if head.startswith(magic) and not (is_text and magic == b"<"):
                self._refuse(text)
        if head[257:262] == b"ustar":
            self._refuse("a tar archive; unpack it")
        if b"\0" in head:
            self._refuse("no text (it has NUL bytes); convert it to JSON Lines in UTF-8")
        # A text is one row; other rows are lines, in which the bounds are found by one scan.
        self._is_array = not is_text and head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
        if self._is_array:
            self._unpack_array()
        if is_text:
            self.content_hash = _checksum([self._file])
            self._bounds = array("q", [0, size + 1] if (size := os.stat(self._file).st_size) else [0])
        else:
            self._bounds = self._scan_lines()
        if len(self) == 0:
            self._refuse("empty; it needs at least one row")
        self._open = open(self._file, "rb")  # noqa: SIM115

    def __len__(self) -> int:
        return len(self._bounds) - 1 if self._table is None else len(self._table)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Returns a row; raises SampleError, without its name, if its text is no JSON object."""
        if self._table is not None:
            row: Mapping[str, Any] = _without_padding(self._table[index])
            return row
        start, end = self._bounds[index : index + 2]
        data = os.pread(self._open.fileno(), end - start - 1, start)
        try:
            text = data.decode("utf-8-sig")
            row = {"text": text} if self._is_text else json.loads(text)
        except UnicodeDecodeError as error:
            text = f"byte {error.start} is not UTF-8; convert the file, such as with iconv"
            raise SampleError(text) from error
        except json.JSONDecodeError as error:
            what = "JSON" if self._is_array else "one JSON object per line"
            raise SampleError(f"it is not {what} ({error})") from error
        if not isinstance(row, dict):
            raise SampleError(f"it is a {type(row).__name__}; write one JSON object per line")
        return row

    def name_of(self, index: int) -> str:
        """Returns the name of a row, such as ``line 5 of chat.jsonl``."""
        if self._table is not None or self._is_array or self._is_text:
            return f"row {index + 1} of {self.path}"
        return f"line {index + 1 if self._numbers is None else self._numbers[index]} of {self.path}"

    @contextmanager
    def naming(self, index: int) -> Iterator[None]:
        """Raises any error of what is done with a row as a SampleError with its name."""
        index = range(len(self))[index]  # an IndexError ends an iteration
        try:
            yield
        except Exception as error:  # any: a row may have any form
            kind = "" if isinstance(error, SampleError) else f"{type(error).__name__}: "
            raise SampleError(f"{self.name_of(index)}: {kind}{error}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._table is None:
            self._open = open(self._file, "rb")  # noqa: SIM115

    def _refuse(self, text: str) -> NoReturn:
        raise ValueError(f"path={self.path}: it is {text}")

    def _scan_lines(self) -> "array[int]":
        """Returns where lines with text start, and the end of the last one plus 1; sets the checksum."""
        bounds = array("q")
        numbers: array[int] | None = None  # stored if a line is blank
        num_lines = num_bytes = crc = 0
        with open(self._file, "rb") as file:
            while chunk := file.read(_CHUNK) + file.readline():
                data = np.frombuffer(chunk, dtype=np.uint8)
                starts = np.append(0, np.flatnonzero(data[:-1] == ord("\n")) + 1)
                ends = np.append(starts[1:], len(chunk))
                # Most blank lines are empty; the rest is looked at only if a line begins with white space.
                has_text = data[starts] != ord("\n")
                for i in np.flatnonzero(has_text & (data[starts] <= ord(" "))):
                    has_text[i] = bool(chunk[starts[i] : ends[i]].strip())
                if numbers is None and not has_text.all():
                    numbers = array("i", range(1, num_lines + 1))
                if numbers is not None:
                    line_numbers = np.flatnonzero(has_text) + num_lines + 1
                    numbers.frombytes(line_numbers.astype(np.int32).tobytes())
                bounds.frombytes((starts[has_text] + num_bytes).tobytes())
                num_lines, num_bytes = num_lines + len(starts), num_bytes + len(chunk)
                crc = zlib.crc32(chunk, crc)
        self.content_hash = f"{num_bytes}-{crc:08x}"
        self._numbers = numbers
        bounds.append(num_bytes + 1)
        return bounds

    def _unpack_array(self) -> None:
        """Writes the elements of an array, which fits in memory once, to lines of a temporary file."""
        try:
            rows = json.loads(Path(self._file).read_bytes())
        except ValueError as error:
            self._refuse(f"no JSON array ({error}); write JSON Lines")
        self._file = temporary_file(self)
        with open(self._file, "w") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)

    def _saved_files(self) -> Iterator[str]:
        """Yields the data files of a folder that ``save_to_disk`` wrote."""
        folder = Path(self.path)
        if (splits := folder / "dataset_dict.json").is_file():
            names = json.loads(splits.read_text())["splits"]
            self._refuse(f"a folder of the splits {', '.join(names)}; set it to {folder / names[0]}")
        if not (state := folder / "state.json").is_file():
            names = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
            self._refuse(f"a folder with {names}, not one of save_to_disk; set it to a file")
        for entry in json.loads(state.read_text())["_data_files"]:
            yield str(folder / entry["filename"])

    def _read_table(self, files: list[str]) -> None:
        """Opens a memory-mapped table of the library ``datasets``."""
        self.content_hash = _checksum(files)
        try:
            import datasets

            is_folder, read = Path(self.path).is_dir(), datasets.Dataset.from_parquet
            self._table = datasets.load_from_disk(self.path) if is_folder else read(files[0])
        except ImportError:
            self._refuse("a table; pip install datasets to read it")
        except Exception as error:  # any: of pyarrow or datasets
            self._refuse(f"a table that cannot be read ({type(error).__name__}: {error})")
        if len(self._table) == 0:
            self._refuse("empty; it needs at least one row")


def _without_padding(value: Any) -> Any:
    """Removes keys with null, with which Arrow gives all mappings of a column the same keys."""
    if isinstance(value, Mapping):
        return {key: _without_padding(inner) for key, inner in value.items() if inner is not None}
    return [*map(_without_padding, value)] if isinstance(value, list) else value


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1024)


def _checksum(paths: Sequence[str]) -> str:
    num_bytes = crc = 0
    for path in paths:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                num_bytes, crc = num_bytes + len(chunk), zlib.crc32(chunk, crc)
    return f"{num_bytes}-{crc:08x}"


def temporary_file(owner: object) -> str:
    """Returns the path of an empty file that exists as long as ``owner``, in the process that makes it."""
    descriptor, path = tempfile.mkstemp(prefix="update_step_")
    os.close(descriptor)
    pid = os.getpid()

    def remove() -> None:
        if os.getpid() == pid:  # a forked worker leaves it to this process
            Path(path).unlink(missing_ok=True)

    weakref.finalize(owner, remove)
    return path
