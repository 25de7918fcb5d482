"""What a teacher says of samples, computed before training and kept on the disk, hundreds of GB of it.

It depends on a sample's tokens and labels and on the teacher, but not on the learning rate, the loss, the order
of samples or the number of ranks; so each sample is known by a hash of what it does depend on. In memory is
only where each sample's rows are; rows are read when they are asked for, from files mapped into memory.

Shapes: m samples of a part, n rows of a sample (its target tokens).
"""

import hashlib
import json
import uuid
import zlib
from collections.abc import Mapping, Sequence
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

_NUM_BYTES_OF_KEY = 16
# NumPy takes zeros at the end for padding. Between keys of one length that confuses no two of them.
_KEY = np.dtype("S16")
_OF_TEXT = ("tokens", "labels", "seq_lens", "input_pos")
_VALUES = "values."

_Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of a row, by name."""


class TeacherCache:
    """What is known of one teacher, the same on all ranks; in a folder that many trainings may share.

    It is kept in parts: files that hold many samples, written once and never changed. What a killed writer
    has begun stays beside them with a name that ends with ``.unfinished``: whether another training
    still writes to it cannot be told, so deleting it is the user's.

    Args:
        folder: made if need be.
        context: what the values depend on besides the sample, as plain values: weights, precision, kind,
            temperature.
        group: a CPU (gloo) group of all ranks, which all see the folder.
        max_part_bytes: a part is written as soon as more than this waits in memory [bytes].
    """

    def __init__(
        self,
        folder: Path,
        context: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        max_part_bytes: int = 64 << 20,
    ) -> None:
        text = json.dumps(context, sort_keys=True, default=str)
        self._context = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self._prefix = self._context.hex()[:16]
        self._folder = folder
        self._group = group
        self._is_zero = group is None or dist.get_rank(group) == 0
        self._max_part_bytes = max_part_bytes
        self._waiting: dict[bytes, dict[str, Tensor]] = {}
        self._num_waiting_bytes = 0
        self._written: set[bytes] = set()  # by this rank, since the ranks told each other
        self._written_names: list[str] = []
        self._parts: dict[str, _Part] = {}
        self._passed_over: set[str] = set()
        if self._is_zero:
            folder.mkdir(parents=True, exist_ok=True)
        # One value, so that the thread that looks samples up never sees the half of a change.
        self._known = _Index.of([])
        self.reload()

    def __len__(self) -> int:
        return len(self._known.keys)

    def key_of(self, sample: Mapping[str, Any]) -> bytes:
        """What a sample's values are known by, 16 bytes.

        Raises:
            ValueError: the sample holds something else than text.
        """
        other = sorted(sample.keys() - {*_OF_TEXT, "mask"})
        if other:
            raise ValueError(
                f"teacher_cache: it holds text only, a sample has {', '.join(other)}, too; set "
                "teacher_cache=null"
            )
        digest = hashlib.blake2b(self._context, digest_size=_NUM_BYTES_OF_KEY)
        for name in _OF_TEXT:
            if name in sample:
                numbers = np.asarray(sample[name], dtype=np.int64)
                digest.update(f"{name} {len(numbers)} ".encode())
                digest.update(numbers.tobytes())
        return digest.digest()

    def knows(self, keys: Sequence[bytes]) -> bool:
        """Whether all of these samples are known."""
        return bool((self._known.places_of(keys) >= 0).all())

    def find(self, keys: Sequence[bytes]) -> dict[str, Tensor]:
        """Values by name, the rows of these samples one after the other, [sum of n, ...].

        Without keys, values of no rows; of an empty cache, no values.

        Raises:
            CheckpointError: a sample is not known, or its values are damaged.
        """
        known = self._known
        places = known.places_of(keys)
        if (places < 0).any():
            raise CheckpointError(
                f"teacher_cache_dir={self._folder}: the dataset returned another sample than in the pass "
                "before training, so what the teacher says of it is not known; set teacher_cache=null"
            )
        num_rows = known.num_rows[places].tolist()
        values = {
            name: torch.empty(sum(num_rows), *shape, dtype=dtype)
            for name, (dtype, shape) in known.layout.items()
        }
        end = 0
        for place, num in zip(places.tolist(), num_rows, strict=True):
            begin, end = end, end + num
            sample = {name: rows[begin:end] for name, rows in values.items()}
            part = known.parts[known.part_numbers[place]]
            part.read(int(known.first_rows[place]), sample)
            if _checksum(sample) != known.checksums[place]:
                raise CheckpointError(
                    f"{part.path}: what it holds of a sample has another checksum than when it was written; "
                    "delete it; the next start computes what it held again"
                )
        return values

    def add(self, key: bytes, values: Mapping[str, Tensor]) -> None:
        """Takes a copy of what the teacher says of a sample; writes a part if enough waits for it.

        Args:
            key: of the sample. Nothing is done if it is known, or was added before.
            values: by name, [n, ...] of any device; but for n alike for all samples.

        Raises:
            ValueError: they are not alike.
            OSError: see :meth:`write`.
        """
        if key in self._waiting or key in self._written or self.knows([key]):
            return
        copies = {
            name: value.detach().to("cpu", copy=True).contiguous()
            for name, value in sorted(values.items())
        }
        if len({len(value) for value in copies.values()}) != 1:
            raise ValueError(f"values have {[len(value) for value in copies.values()]} rows")
        first = next(iter(self._waiting.values()), None)
        layout = _layout_of(first) if first else self._known.layout
        if layout and layout != _layout_of(copies):
            raise ValueError(f"values are {_layout_of(copies)}, those of other samples {layout}")
        self._waiting[key] = copies
        self._num_waiting_bytes += sum(value.nbytes for value in copies.values())
        if self._num_waiting_bytes > self._max_part_bytes:
            self.write()

    def write(self) -> None:
        """Writes what waits as one part, whole or not at all. It is found after :meth:`reload`.

        Raises:
            OSError: it could not be written; names the file. Nothing is left of it, and all still waits.
        """
        if not self._waiting:
            return
        name = f"{self._prefix}-{uuid.uuid4().hex[:16]}.safetensors"
        _write(self._folder / name, self._waiting)
        self._written_names.append(name)
        self._written.update(self._waiting)
        self._waiting = {}
        self._num_waiting_bytes = 0

    def reload(self) -> None:
        """Finds what any rank has written, and what other trainings have. All ranks together."""
        # One rank lists the folder, and each says what it has written: on a network's file system listings
        # of two ranks may differ, and what one knows all must know.
        names = list(self._written_names)
        if self._is_zero:
            names += [path.name for path in self._folder.glob(f"{self._prefix}-*.safetensors")]
        of_ranks = gather_objects(names, self._group)
        parts: dict[str, _Part] = {}
        damaged: dict[str, str] = {}
        for name in sorted({name for of_rank in of_ranks for name in of_rank} - self._passed_over):
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
                damaged[name] = f"{part.path}: it holds something else than other parts"
        for problem in damaged.values() if self._is_zero else ():
            _log.warning(
                f"teacher_cache_dir: {problem}; passed over, what it held is computed again"
            )
        self._passed_over |= damaged.keys()
        self._parts = {name: part for name, part in parts.items() if name not in damaged}
        self._known = _Index.of(list(self._parts.values()))
        self._written, self._written_names = set(), []


class _Part:
    """A file of the cache, open: what its samples are found by, and their values to be read.

    Raises:
        CheckpointError: it is damaged, or something else; names the file.
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
            raise CheckpointError(f"{path}: it holds something else")
        raw, self.num_rows, self.checksums = (
            self._file.read(name).numpy() for name in ("keys", "num_rows", "crc32")
        )
        self.keys = raw.reshape(-1).view(_KEY)
        self.layout: _Layout = {
            name: (dtype, shape[1:]) for name, (dtype, shape) in of_values.items()
        }
        checksum = _checksum_of_index(self.keys, self.num_rows, self.checksums, self.layout)
        if not torch.equal(self._file.read("index_crc32"), torch.tensor(checksum)):
            raise CheckpointError(f"{path}: its checksum is another one")
        ((_, (total, *_)), *_) = of_values.values()
        if (
            any(shape[0] != total for _, shape in of_values.values())
            or ((self.num_rows < 0) | (self.num_rows > total)).any()
            or self.num_rows.sum() != total
        ):
            raise CheckpointError(f"{path}: its samples have other rows than its values")

    def read(self, first_row: int, into: Mapping[str, Tensor]) -> None:
        """Fills ``into``, values by name, [n, ...], with the rows from ``first_row`` on."""
        for name, rows in into.items():
            if len(rows):
                wanted = slice(first_row, first_row + len(rows))
                rows.copy_(self._file.read(_VALUES + name, (wanted,)))


class _Index(NamedTuple):
    """Where to find each sample; arrays are in the order of the keys."""

    parts: Sequence[_Part]
    layout: _Layout
    keys: np.ndarray
    """Sorted, each once."""
    part_numbers: np.ndarray
    first_rows: np.ndarray
    """Of a sample, in its part."""
    num_rows: np.ndarray
    checksums: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[_Part]) -> "_Index":
        """That of parts of one layout; of equal keys the first one's."""
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
        """Where samples are in the arrays; -1 for those that are not known."""
        wanted = np.frombuffer(b"".join(keys), dtype=_KEY)
        if not len(self.keys):
            return np.full(len(wanted), -1)
        places = np.searchsorted(self.keys, wanted).clip(max=len(self.keys) - 1)
        return np.where(self.keys[places] == wanted, places, -1)


def _joined(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=dtype), *arrays])


def _write(path: Path, samples: Mapping[bytes, Mapping[str, Tensor]]) -> None:
    of_samples = list(samples.values())
    layout = _layout_of(of_samples[0])
    keys = np.frombuffer(bytearray(b"".join(samples)), dtype=_KEY)
    num_rows = np.array([len(next(iter(each.values()))) for each in of_samples], dtype=np.int64)
    checksums = np.array([_checksum(each) for each in of_samples], dtype=np.int64)
    tensors = {
        "keys": torch.from_numpy(keys.view(np.uint8)).view(-1, _NUM_BYTES_OF_KEY),
        "num_rows": torch.from_numpy(num_rows),
        "crc32": torch.from_numpy(checksums),
        "index_crc32": torch.tensor(_checksum_of_index(keys, num_rows, checksums, layout)),
    }
    for name in layout:
        tensors[_VALUES + name] = torch.cat([each[name] for each in of_samples])
    replace_with_tensors(path, tensors)


def _layout_of(values: Mapping[str, Tensor]) -> _Layout:
    return {name: (value.dtype, tuple(value.shape[1:])) for name, value in sorted(values.items())}


def _checksum(values: Mapping[str, Tensor]) -> int:
    """Of one sample's values."""
    checksum = 0
    for name in sorted(values):
        content: Any = values[name].reshape(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(content, checksum)
    return checksum


def _checksum_of_index(
    keys: np.ndarray, num_rows: np.ndarray, checksums: np.ndarray, layout: _Layout
) -> int:
    """Of all that values are found by, and of what they are: rows of another dtype would pass their own."""
    checksum = zlib.crc32(str(sorted(layout.items())).encode())
    for array in (keys, num_rows, checksums):
        checksum = zlib.crc32(array.tobytes(), checksum)
    return checksum
