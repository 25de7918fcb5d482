"""Rows of all files of a path, or of one side of their split into training and validation.

Example: ``path: [a.jsonl, b/]`` with 3 rows in ``a.jsonl`` and 2 in ``b/1.jsonl`` has 5 rows. Row 3 is the first line of
``b/1.jsonl``, and is named so in errors.
"""

import glob
import os
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from recipe_utils.text.conversations.files import FileRows, suffix_of
from recipe_utils.update_steps.samples import Facts, SampleError

_SUFFIXES = {".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".tsv"}
_SHARD = re.compile(r"-\d+-of-\d+")
_SPLIT = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")


class PathRows:
    """Rows of files, in the order of a list or of their names.

    Args:
        path: a file, a folder of files of one split, a pattern such as ``data/train-*.parquet``, or a list of these.
        split: ``train`` or ``validation`` takes the rows of one side. A row's side depends on its content alone, so
            that other rows, their order and their files do not matter, and equal rows are on the same side.
        validation_fraction: expected share of the rows in ``validation``.
        text_key: see :class:`.FileRows`.

    Raises:
        ValueError: a file has another format or no rows; a wrong split, or one without rows.
        OSError: a file cannot be read.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        split: str | None = None,
        validation_fraction: float | None = None,
        text_key: str | None = None,
    ) -> None:
        given = f"split={split}, validation_fraction={validation_fraction}"
        is_split = split in ("train", "validation") and validation_fraction is not None and 0 < validation_fraction < 1
        if not is_split and (split, validation_fraction) != (None, None):
            text = "set them to train or validation and to a share between 0 and 1, or both to null"
            raise ValueError(f"{given}: {text}")
        self.path, paths = path, [path] if isinstance(path, str) else path
        self._files = [FileRows(file, text_key) for each in paths for file in _files_of(each)]
        if not self._files:
            raise ValueError("path=[]: it is empty; set it to a file")
        self._ends = [*accumulate(map(len, self._files))]
        hashes = [file.content_hash for file in self._files]
        whole = f"{len(hashes)}-{zlib.crc32(' '.join(hashes).encode()):08x}"
        self.content_hash = (hashes[0] if len(hashes) == 1 else whole) + f", {given}" * is_split
        self._indices: np.ndarray | None = None
        """Indices of the rows of a split [n] int64."""
        if validation_fraction is not None:
            contents = chain.from_iterable(file.contents() for file in self._files)
            crcs = np.fromiter(map(zlib.crc32, contents), np.uint32, self._ends[-1])
            # Bits of a crc are sums of the row's; the high bits of a product depend on them in no simple way.
            is_validation = crcs * np.uint32(0x9E3779B1) < validation_fraction * 2**32
            self._indices = np.flatnonzero(is_validation == (split == "validation"))
            if not len(self):
                raise ValueError(f"{given}: none of the {self._ends[-1]} rows is of it; set another fraction")

    def __len__(self) -> int:
        return self._ends[-1] if self._indices is None else len(self._indices)

    def facts(self) -> Facts:
        """Returns the hash of its files."""
        return Facts(content={"": self.content_hash})

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Returns a row; raises SampleError, without its name, if it cannot be read."""
        file, index = self._place(index)
        return file[index]

    def file_of(self, index: int) -> int:
        """Returns the place of a row's file among the files."""
        return self._files.index(self._place(index)[0])

    @contextmanager
    def naming(self, index: int, part: str = "") -> Iterator[None]:
        """Raises any error of what is done with a row as a SampleError with its name, and that of its ``part``."""
        self._place(index)  # an IndexError ends an iteration
        try:
            yield
        except Exception as error:  # any: a row may have any form
            kind = "" if isinstance(error, SampleError) else f"{type(error).__name__}: "
            raise SampleError(f"{self.name_of(index)}: {part}{kind}{error}") from None

    def name_of(self, index: int) -> str:
        """Returns the name of a row, such as ``line 2 of a.jsonl``."""
        file, index = self._place(index)
        return file.name_of(index)

    def _place(self, index: int) -> tuple[FileRows, int]:
        """Returns the file of a row, and the row's index in it."""
        index = range(len(self))[index]
        if self._indices is not None:
            index = int(self._indices[index])
        file = self._files[number := bisect_right(self._ends, index)]
        return file, index - self._ends[number] + len(file)


def _files_of(path: str) -> Sequence[str]:
    """Returns the files of a path by name; raises ValueError if a folder has several formats or splits, or none."""
    if glob.has_magic(path) and not Path(path).exists():
        if files := sorted(filter(os.path.isfile, glob.glob(path, recursive=True))):
            return files
        raise ValueError(f"path={path}: no file matches it; correct the pattern")
    folder = Path(path)
    if not folder.is_dir() or any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return [path]
    # Pattern -> files. The hub has them in a folder `data`, named train-00000-of-00002.parquet.
    sets = defaultdict[str, list[str]](list)
    for file in sorted([*folder.glob("*"), *folder.glob("data/*")]):
        if (suffix := suffix_of(file.name)) in _SUFFIXES and not file.name.startswith((".", "_", "dataset_info")):
            shard, split = _SHARD.search(file.name), _SPLIT.search(file.name)
            name = f"{file.name[: shard.start()]}-" if shard else f"*{split[0]}" if split else ""
            sets[str(file.with_name(f"{name}*{suffix}{'.gz' * file.name.endswith('.gz')}"))].append(str(file))
    if len(sets) == 1:
        return [file for files in sets.values() for file in files]
    if sets:
        raise ValueError(f"path={path}: it has several splits or formats of files; set it to one of {', '.join(sets)}")
    names = ", ".join(sorted(file.name for file in folder.iterdir())[:5]) or "nothing"
    raise ValueError(f"path={path}: it is a folder with {names}; set it to a file, or a pattern such as {path}/*.txt")
