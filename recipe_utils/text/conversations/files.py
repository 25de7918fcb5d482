r"""Rows of one data file, read when they are needed.

Example: ``{"a": 1}\n\n{"a": 22}\n`` is scanned once. The scan stores the bounds [0, 10, 20] of its rows, the numbers
[1, 3] of their lines and a checksum. ``rows[1]`` reads the bytes 10 to 19, and returns {"a": 22}.
"""

import csv
import gzip
import json
import os
import shutil
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from itertools import pairwise
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
_BOM = b"\xef\xbb\xbf"
_HOLDERS = {"data", "examples", "items", "rows", "samples", "train"}
"""Keys of the rows in a JSON object that has no other list of objects."""
_SPLITS = {"train", "validation", "test", "train_sft", "test_sft"}
csv.field_size_limit(max(csv.field_size_limit(), 1 << 24))  # of the process; 131,072 characters by default


class FileRows:
    """Rows of a file in JSON Lines, of one JSON value, of CSV or parquet, or of a ``save_to_disk`` folder.

    The first bytes determine the format, also of what gzip unpacks to a temporary file; of CSV, the name. Bounds of
    rows [n + 1] int64 are in memory, rows are not. Pickling copies no data.

    Args:
        path: a file, or a folder that ``datasets.Dataset.save_to_disk`` wrote.
        text_key: makes a file named ``.txt`` one row, with the text at this key.

    Raises:
        ValueError: the file has another format or no rows; the error contains its format and what to do.
        OSError: ``path`` cannot be read.
    """

    _bounds: "array[int]"
    content_hash: str
    """Size and crc32 of all bytes of the data."""

    def __init__(self, path: str, text_key: str | None = None) -> None:
        self.path, self._file, suffix = path, path, suffix_of(path)
        self._text_key = text_key if suffix == ".txt" else None
        self._numbers = array("i")
        """Number of the line in which each row starts, if rows are in lines."""
        self._delimiter, self._header = "", b""
        """Those of CSV."""
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
            if head.startswith(magic) and not (self._text_key and magic == b"<"):
                self._refuse(text)
        if head[257:262] == b"ustar":
            self._refuse("a tar archive; unpack it")
        if b"\0" in head:
            self._refuse("no text (it has NUL bytes); convert it to JSON Lines in UTF-8")
        # A text is one row; other rows are lines, or several in CSV, in which the bounds are found by one scan.
        start = head.removeprefix(_BOM).lstrip()
        if self._text_key:
            self.content_hash = _checksum([self._file])
            self._bounds = array("q", [0, size + 1] if (size := os.stat(self._file).st_size) else [0])
        elif suffix in (".csv", ".tsv") and start[:1] not in (b"[", b"{"):
            first_line = start.partition(b"\n")[0].decode("latin-1")
            self._delimiter = "\t" if suffix == ".tsv" else max(",;\t", key=first_line.count)
            self._scan_lines()
        else:
            self._scan_lines()
            if start[:1] in (b"[", b"{"):
                self._unpack_value()
        self._open = open(self._file, "rb")  # noqa: SIM115
        if self._delimiter and len(self):
            self._header = os.pread(self._open.fileno(), self._bounds[1], 0)
            del self._bounds[0], self._numbers[0]
        if len(self) == 0:
            self._refuse("empty; it needs at least one row")

    def __len__(self) -> int:
        return len(self._bounds) - 1 if self._table is None else len(self._table)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Returns a row; raises SampleError, without its name, if its text is no JSON object."""
        if self._table is not None:
            row: Mapping[str, Any] = _without_padding(self._table[index])
            return row
        # Reads the row's bytes at their place: processes that share the file share its position.
        start, end = self._bounds[index : index + 2]
        data = self._header + os.pread(self._open.fileno(), end - start - 1, start)
        try:
            text = data.decode("utf-8-sig")
            if self._delimiter:
                return self._row_of_csv(text)
            row = {self._text_key: text} if self._text_key else json.loads(text)
        except UnicodeDecodeError as error:
            raise SampleError(f"byte {error.start} is not UTF-8; convert the file, such as with iconv") from error
        except csv.Error as error:
            raise SampleError(f"it is not CSV ({error})") from error
        except json.JSONDecodeError as error:
            raise SampleError(f"it is not one JSON object per line ({error})") from error
        if not isinstance(row, dict):
            raise SampleError(f"it is a {type(row).__name__}; write one JSON object per line")
        return row

    def _row_of_csv(self, text: str) -> dict[str, str]:
        """Returns the row after a header. Empty fields and columns without a name, such as an index, are absent."""
        header, *rows = filter(None, csv.reader(StringIO(text, newline="\n"), delimiter=self._delimiter, strict=True))
        names = [*filter(None, header)]
        if len({*names}) < len(names):
            raise csv.Error(f"two of the columns {', '.join(names)} have one name; rename one")
        if [*map(len, rows)] != [len(header)]:
            text = f"it needs one field for each of the columns {', '.join(header)}"
            raise csv.Error(f"{text}; quote fields that contain {self._delimiter!r}, and write two quotes for one")
        return {name: field for name, field in zip(header, rows[0], strict=True) if name and field}

    def name_of(self, index: int) -> str:
        """Returns the name of a row, such as ``line 5 of chat.jsonl``."""
        return f"line {self._numbers[index]} of {self.path}" if self._numbers else f"row {index + 1} of {self.path}"

    def contents(self) -> Iterator[bytes]:
        """Yields the bytes of each row without white space around; of a table, its JSON."""
        if self._table is not None:
            for row in self._table:
                yield json.dumps(_without_padding(row), sort_keys=True, default=str).encode()
            return
        with open(self._file, "rb") as file:
            file.seek(self._bounds[0])
            for start, end in pairwise(self._bounds):
                yield file.read(end - start).removeprefix(_BOM).strip()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._table is None:
            self._open = open(self._file, "rb")  # noqa: SIM115

    def _refuse(self, text: str) -> NoReturn:
        raise ValueError(f"path={self.path}: it is {text}")

    def _scan_lines(self) -> None:
        """Finds where rows start, and the end of the last one plus 1; also their lines and the checksum."""
        bounds, numbers = array("q"), array("i")
        num_lines = num_bytes = num_quotes = crc = 0
        with open(self._file, "rb") as file:
            while chunk := file.read(_CHUNK) + file.readline():
                data = np.frombuffer(chunk, dtype=np.uint8)
                starts = np.append(0, np.flatnonzero(data[:-1] == ord("\n")) + 1)
                ends = np.append(starts[1:], len(chunk))
                # Most blank lines are empty; the rest is looked at only if a line begins with white space.
                is_row = data[starts] != ord("\n")
                for i in np.flatnonzero(is_row & (data[starts] <= ord(" "))):
                    is_row[i] = bool(chunk[starts[i] : ends[i]].strip())
                if self._delimiter:  # a line break of CSV ends a row if the quotes before it are pairs
                    quotes = np.flatnonzero(data == ord('"'))
                    is_row &= (num_quotes + np.searchsorted(quotes, starts)) % 2 == 0
                    num_quotes += len(quotes)
                numbers.frombytes((np.flatnonzero(is_row) + num_lines + 1).astype(np.int32).tobytes())
                bounds.frombytes((starts[is_row] + num_bytes).tobytes())
                num_lines, num_bytes = num_lines + len(starts), num_bytes + len(chunk)
                crc = zlib.crc32(chunk, crc)
        if num_quotes % 2:
            text = f"from line {numbers[-1] if numbers else 1}"
            self._refuse(f"CSV with a quote that has no end, probably {text}; write two for one in a quoted field")
        bounds.append(num_bytes + 1)
        self._bounds, self._numbers, self.content_hash = bounds, numbers, f"{num_bytes}-{crc:08x}"

    def _unpack_value(self) -> None:
        """Writes the rows of one JSON value, which fits in memory once, to a temporary file; leaves lines as they are."""
        with open(self._file, "rb") as file:
            first_line = file.read(self._bounds[1]).removeprefix(_BOM).strip()
        # Files of several objects are JSON Lines; only others are read as a whole.
        is_row = first_line.startswith(b"{") and first_line.endswith(b"}")
        if is_row and len(self) > 1:
            return
        try:
            value = json.loads(Path(self._file).read_bytes())
        except ValueError as error:
            if is_row:
                return
            self._refuse(f"no JSON array or object ({error}); write one object per line, such as with jq -c .")
        # An object is one row, or holds the rows under one of the names that tools give them.
        if isinstance(value, dict):
            names = [name for name, rows in value.items() if isinstance(rows, list) and isinstance([*rows, 0][0], dict)]
            if len(names) == 1 and names[0] in _HOLDERS:
                value = value[names[0]]
            elif "rows" in names and all(isinstance(each.get("row"), dict) for each in value["rows"]):
                value = [each["row"] for each in value["rows"]]  # of the hub's dataset server
            elif len(names) > 1 and {*names} & _SPLITS and len(names) == len(value):
                self._refuse(f"an object of the splits {', '.join(names)}; write the rows of one to a file")
            elif is_row:
                return
            else:
                value = [value]
        if value and isinstance(value[0], dict) and value[0].keys() >= {"role", "content"}:
            self._refuse('one conversation; write {"messages": [...]} on a line, and further ones on further lines')
        # From here on the file is one of lines; it has no line numbers of the user's.
        self._file = temporary_file(self)
        with open(self._file, "w") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in value)
        self._scan_lines()
        self._numbers = array("i")

    def _saved_files(self) -> Iterator[str]:
        """Yields the data files of a folder that ``save_to_disk`` wrote."""
        folder = Path(self.path)
        if (splits := folder / "dataset_dict.json").is_file():
            names = json.loads(splits.read_text())["splits"]
            self._refuse(f"a folder of the splits {', '.join(names)}; set it to {folder / names[0]}")
        state = folder / "state.json"
        for entry in json.loads(state.read_text())["_data_files"]:
            yield str(folder / entry["filename"])

    def _read_table(self, files: list[str]) -> None:
        """Opens a memory-mapped table of the library ``datasets``."""
        self.content_hash = _checksum(files)
        import datasets  # takes a second

        try:
            is_folder, read = Path(self.path).is_dir(), datasets.Dataset.from_parquet
            self._table = datasets.load_from_disk(self.path) if is_folder else read(files[0])
        except Exception as error:  # any: of pyarrow or datasets
            self._refuse(f"a table that cannot be read ({type(error).__name__}: {error})")
        if len(self._table) == 0:
            self._refuse("empty; it needs at least one row")
        # Images stay as the bytes of their files, which are decoded with their sample.
        plain = datasets.Image(decode=False)
        for name, kind in self._table.features.items():
            if isinstance(kind, datasets.Image):
                self._table = self._table.cast_column(name, plain)
            elif isinstance(getattr(kind, "feature", None), datasets.Image):
                self._table = self._table.cast_column(name, datasets.List(plain))


def _without_padding(value: Any) -> Any:
    """Removes keys with null, with which Arrow gives all mappings of a column the same keys."""
    if isinstance(value, Mapping):
        return {key: _without_padding(inner) for key, inner in value.items() if inner is not None}
    return [*map(_without_padding, value)] if isinstance(value, list) else value


def suffix_of(path: str) -> str:
    """Returns the last suffix of a name in lower case, without that of gzip."""
    return Path(path.lower().removesuffix(".gz")).suffix


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
