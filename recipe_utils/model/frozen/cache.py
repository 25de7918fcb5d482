"""Disk cache of a frozen model's outputs, hundreds of GB of them.

A sample's key is a hash of what its outputs depend on: its tokens and labels, and the model; not
the learning rate, the loss, the order of samples or the number of ranks. The index is in memory;
rows are read from memory-mapped files.

Shapes: n rows of a sample (one of a pair; one of each target token).
"""

import hashlib
import json
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchtune.utils import get_logger

from recipe_utils.files import CheckpointError, TensorFile, replace_with_tensors
from recipe_utils.parallel.process_group import gather_objects

_log = get_logger("INFO")

Values = dict[str, Tensor]
"""Outputs by name, with the rows of samples concatenated, [sum of n, ...]."""

_NUM_BYTES_OF_KEY = 16
# NumPy drops trailing zero bytes. Keys of equal length stay distinct.
_KEY = np.dtype("S16")
_VALUES = "values."

_Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of a row, by name."""


class OutputCache:
    """Outputs of one frozen model, the same on all ranks, in a folder that several trainings may share.

    Stored in parts: files of many samples that are written once and never changed. A killed writer
    leaves a file whose name ends with ``.unfinished``. It is never deleted, because another
    training may still be writing to it.

    Args:
        folder: created if it does not exist.
        key: config key of the folder, for errors.
        context: plain values that outputs depend on besides the sample: weights, precision, layout.
        group: a CPU (gloo) group of all ranks, all of which must see the folder.
        gathers: rank 0 writes the outputs of all ranks; for small outputs. Else each rank writes
            its own parts.
        max_part_bytes: size of unwritten outputs above which a rank writes a part [bytes].
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        context: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        gathers: bool = False,
        max_part_bytes: int = 64 << 20,
    ) -> None:
        text = json.dumps(context, sort_keys=True, default=str)
        self._context = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self._prefix = self._context.hex()[:16]
        self._folder = folder
        self._key = key
        self._group = group
        self._is_zero = group is None or dist.get_rank(group) == 0
        self._gathers = gathers
        self._max_part_bytes = max_part_bytes
        self._waiting: dict[bytes, Values] = {}
        self._num_waiting_bytes = 0
        self._written: set[bytes] = set()  # since the last reload
        self._written_names: list[str] = []
        self._parts: dict[str, _Part] = {}
        self._skipped: set[str] = set()
        if self._is_zero:
            folder.mkdir(parents=True, exist_ok=True)
        # One reference, so that the prefetch thread never reads a half-changed index.
        self._index = _Index.of([])
        self.reload()

    def __len__(self) -> int:
        return len(self._index.keys)

    def key_of(self, numbers_by_name: Mapping[str, Any]) -> bytes:
        """Returns a sample's key, 16 bytes: a hash of the context and of the sample's integers."""
        digest = hashlib.blake2b(self._context, digest_size=_NUM_BYTES_OF_KEY)
        for name, values in numbers_by_name.items():
            numbers = np.asarray(values, dtype=np.int64)
            digest.update(f"{name} {len(numbers)} ".encode())
            digest.update(numbers.tobytes())
        return digest.digest()

    def contains(self, keys: Sequence[bytes]) -> np.ndarray:
        """Returns a bool for each sample: True if it is in the cache."""
        return self._index.places_of(keys) >= 0

    def find(self, keys: Sequence[bytes]) -> Values:
        """Reads the outputs of samples. Without keys, tensors have no rows; an empty cache returns no tensors.

        Raises:
            CheckpointError: a sample is not in the cache, or its outputs are corrupt.
        """
        index = self._index
        places = index.places_of(keys)
        if (places < 0).any():
            raise CheckpointError(
                f"{self._key}={self._folder}: the dataset returned another sample than in the pass before "
                "training, which the cache does not contain; train without a cache"
            )
        num_rows = index.num_rows[places].tolist()
        values = {
            name: torch.empty(sum(num_rows), *shape, dtype=dtype)
            for name, (dtype, shape) in index.layout.items()
        }
        end = 0
        for place, num in zip(places.tolist(), num_rows, strict=True):
            begin, end = end, end + num
            sample = {name: rows[begin:end] for name, rows in values.items()}
            part = index.parts[index.part_numbers[place]]
            part.read(int(index.first_rows[place]), sample)
            if _checksum(sample) != index.checksums[place]:
                raise CheckpointError(
                    f"{part.path}: a sample's outputs have another checksum than when they were written; "
                    "delete the file; the next start computes its outputs again"
                )
        return values

    def add(self, keys: Sequence[bytes], num_rows: Sequence[int], values: Values) -> None:
        """Copies the outputs of new samples; writes a part above ``max_part_bytes``.

        Raises:
            ValueError: other dtypes or shapes.
            OSError: see :meth:`write`.
        """
        waiting = next(iter(self._waiting.values()), None)
        layout = _layout_of(waiting) if waiting else self._index.layout
        if layout and layout != _layout_of(values):
            raise ValueError(f"outputs are {_layout_of(values)}, other samples' {layout}")
        for key, of_sample in _split(keys, num_rows, values):
            if key in self._waiting or key in self._written or self.contains([key]).all():
                continue
            copies = {
                name: rows.detach().to("cpu", copy=True).contiguous()
                for name, rows in of_sample.items()
            }
            self._waiting[key] = copies
            self._num_waiting_bytes += sum(rows.nbytes for rows in copies.values())
        if self._num_waiting_bytes > self._max_part_bytes and not self._gathers:
            self.write()

    def write(self) -> None:
        """Writes unwritten outputs as one part, atomically; :meth:`reload` makes them readable.

        All ranks together if it ``gathers``.

        Raises:
            OSError: the part could not be written; names the file. It is removed and the outputs
                remain unwritten.
        """
        if self._gathers:
            of_ranks = gather_objects(_join(self._waiting), self._group)
            self._written.update(self._waiting)
            self._waiting = {}
            for keys, num_rows, values in of_ranks if self._is_zero else ():
                self._waiting |= _split(keys, num_rows, values)
        if not self._waiting:
            return
        name = f"{self._prefix}-{uuid.uuid4().hex[:16]}.safetensors"
        _write(self._folder / name, self._waiting)
        self._written_names.append(name)
        self._written.update(self._waiting)
        self._waiting = {}
        self._num_waiting_bytes = 0

    def reload(self) -> None:
        """Indexes the parts of all ranks and other trainings. All ranks together."""
        # One rank lists the folder and each reports its own parts: listings of network file systems may differ
        # between ranks, and the index must be equal on all of them.
        names = list(self._written_names)
        if self._is_zero:
            names += [path.name for path in self._folder.glob(f"{self._prefix}-*.safetensors")]
        of_ranks = gather_objects(names, self._group)
        parts: dict[str, _Part] = {}
        damaged: dict[str, str] = {}
        for name in sorted({name for of_rank in of_ranks for name in of_rank} - self._skipped):
            try:
                parts[name] = self._parts.get(name) or _Part(self._folder / name)
            except CheckpointError as error:
                damaged[name] = str(error)
        for of_rank in gather_objects(damaged, self._group):
            damaged |= of_rank
        parts = {name: part for name, part in parts.items() if name not in damaged}
        layout = next((part.layout for part in parts.values()), {})
        for name, part in parts.items():
            if part.layout != layout:
                damaged[name] = f"{part.path}: it contains other outputs than other parts"
        for problem in damaged.values() if self._is_zero else ():
            _log.warning(f"{self._key}: {problem}; skipped, its outputs are computed again")
        self._skipped |= damaged.keys()
        self._parts = {name: part for name, part in parts.items() if name not in damaged}
        self._index = _Index.of(list(self._parts.values()))
        self._written, self._written_names = set(), []


class _Part:
    """Open file of the cache.

    Raises:
        CheckpointError: it is corrupt, or not a part; names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = TensorFile(path)
        layouts = {name: self._file.layout(name) for name in sorted(self._file.names())}
        of_values = {
            name.removeprefix(_VALUES): layout
            for name, layout in layouts.items()
            if name.startswith(_VALUES)
        }
        num_samples = layouts.get("keys", (None, ()))[1][:1]
        of_index = {
            "keys": (torch.uint8, (*num_samples, _NUM_BYTES_OF_KEY)),
            "num_rows": (torch.int64, num_samples),
            "crc32": (torch.int64, num_samples),
            "index_crc32": (torch.int64, ()),
        }
        if (
            {name: layouts.get(name) for name in of_index} != of_index
            or not of_values
            or any(len(shape) == 0 for _, shape in of_values.values())
        ):
            raise CheckpointError(f"{path}: it is no part of a cache")
        raw, self.num_rows, self.checksums = (
            self._file.read(name).numpy() for name in ("keys", "num_rows", "crc32")
        )
        self.keys = raw.reshape(-1).view(_KEY)
        self.layout: _Layout = {
            name: (dtype, shape[1:]) for name, (dtype, shape) in of_values.items()
        }
        checksum = _checksum_of_index(self.keys, self.num_rows, self.checksums, self.layout)
        if not torch.equal(self._file.read("index_crc32"), torch.tensor(checksum)):
            raise CheckpointError(f"{path}: it has another checksum than when it was written")
        ((_, (total, *_)), *_) = of_values.values()
        if (
            any(shape[0] != total for _, shape in of_values.values())
            or ((self.num_rows < 0) | (self.num_rows > total)).any()
            or self.num_rows.sum() != total
        ):
            raise CheckpointError(f"{path}: its samples have other rows than its outputs")

    def read(self, first_row: int, into: Values) -> None:
        """Fills ``into``, [n, ...] by name, with the rows from ``first_row`` on."""
        for name, rows in into.items():
            if len(rows):
                wanted = slice(first_row, first_row + len(rows))
                rows.copy_(self._file.read(_VALUES + name, (wanted,)))


class _Index(NamedTuple):
    """Location of each sample's rows; arrays are in the order of the keys."""

    parts: Sequence[_Part]
    layout: _Layout
    keys: np.ndarray
    """Sorted and unique."""
    part_numbers: np.ndarray
    first_rows: np.ndarray
    """First row of a sample in its part."""
    num_rows: np.ndarray
    checksums: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[_Part]) -> "_Index":
        """Returns the index of parts of one layout; of equal keys the first one counts."""
        numbers = [np.full(len(part.keys), i, dtype=np.int32) for i, part in enumerate(parts)]
        firsts = [np.cumsum(part.num_rows) - part.num_rows for part in parts]
        keys, order = np.unique(_joined([part.keys for part in parts], _KEY), return_index=True)
        return cls(
            parts,
            parts[0].layout if parts else {},
            keys,
            _joined(numbers, np.int32)[order],
            _joined(firsts, np.int64)[order],
            _joined([part.num_rows for part in parts], np.int64)[order],
            _joined([part.checksums for part in parts], np.int64)[order],
        )

    def places_of(self, keys: Sequence[bytes]) -> np.ndarray:
        """Returns positions of samples in the arrays; -1 for those that are not in the cache."""
        wanted = np.frombuffer(b"".join(keys), dtype=_KEY)
        if not len(self.keys):
            return np.full(len(wanted), -1)
        places = np.searchsorted(self.keys, wanted).clip(max=len(self.keys) - 1)
        return np.where(self.keys[places] == wanted, places, -1)


def _joined(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=dtype), *arrays])


def _write(path: Path, samples: Mapping[bytes, Values]) -> None:
    joined_keys, rows_of_samples, values = _join(samples)
    keys = np.frombuffer(bytearray(b"".join(joined_keys)), dtype=_KEY)
    num_rows = np.array(rows_of_samples, dtype=np.int64)
    checksums = np.array([_checksum(each) for each in samples.values()], dtype=np.int64)
    tensors = {
        "keys": torch.from_numpy(keys.view(np.uint8)).view(-1, _NUM_BYTES_OF_KEY),
        "num_rows": torch.from_numpy(num_rows),
        "crc32": torch.from_numpy(checksums),
        "index_crc32": torch.tensor(
            _checksum_of_index(keys, num_rows, checksums, _layout_of(values))
        ),
    }
    tensors |= {_VALUES + name: rows for name, rows in values.items()}
    replace_with_tensors(path, tensors)


def _join(samples: Mapping[bytes, Values]) -> tuple[list[bytes], list[int], Values]:
    """Returns keys, numbers of rows, and the concatenated rows of all samples."""
    of_samples = list(samples.values())
    names = sorted(of_samples[0]) if of_samples else []
    num_rows = [len(each[names[0]]) for each in of_samples]
    return list(samples), num_rows, {n: torch.cat([each[n] for each in of_samples]) for n in names}


def _split(
    keys: Sequence[bytes], num_rows: Sequence[int], values: Values
) -> Iterator[tuple[bytes, Values]]:
    """Inverts :func:`_join`."""
    parts = {name: rows.split(list(num_rows)) for name, rows in values.items()}
    for index, key in enumerate(keys):
        yield key, {name: of_samples[index] for name, of_samples in parts.items()}


def _layout_of(values: Values) -> _Layout:
    return {name: (value.dtype, tuple(value.shape[1:])) for name, value in sorted(values.items())}


def _checksum(values: Values) -> int:
    """Returns the CRC-32 of one sample's outputs."""
    checksum = 0
    for name in sorted(values):
        content: Any = values[name].reshape(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(content, checksum)
    return checksum


def _checksum_of_index(
    keys: np.ndarray, num_rows: np.ndarray, checksums: np.ndarray, layout: _Layout
) -> int:
    """Returns the CRC-32 of index and layout; rows' own checksums do not cover their dtype."""
    checksum = zlib.crc32(str(sorted(layout.items())).encode())
    for array in (keys, num_rows, checksums):
        checksum = zlib.crc32(array.tobytes(), checksum)
    return checksum
