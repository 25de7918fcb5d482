"""Disk cache of a frozen model's outputs, hundreds of GB of them.

A sample's key is a hash of what its outputs depend on: its tokens and labels, and the model; not
the learning rate, the loss, the order of samples or the number of ranks. The index is in memory;
rows are read from memory-mapped files.

Shapes: n rows of a sample (one of a pair; one of each target token).
"""

import hashlib
import json
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchtune.utils import get_logger

from recipe_utils.files import CheckpointError, TensorFile, write_tensors
from recipe_utils.parallel.process_group import gather_objects

_log = get_logger("INFO")

Values = dict[str, Tensor]
"""Outputs by name, with the rows of samples concatenated, [sum of n, ...]."""

_NUM_BYTES_OF_KEY = 16
_KEY = f"S{_NUM_BYTES_OF_KEY}"
_VALUES = "values."
_INDEX = ("keys", "num_rows", "crc32")

_Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of a row, by name."""


class OutputCache:
    """Outputs of one frozen model, the same on all ranks, in a folder that trainings may share.

    Stored in parts: files of many samples that a rank writes once. A killed writer leaves a file
    that ends with ``.unfinished``; it is kept, because another training may still write to it.

    Args:
        folder: created if it does not exist.
        key: config key of the folder, for errors.
        context: plain values that outputs depend on besides the sample: weights, precision, layout.
        group: a CPU (gloo) group of all ranks, all of which must see the folder.
        max_part_bytes: size of unwritten outputs above which a rank writes a part [bytes].
        max_seconds: age of unwritten outputs above which a rank writes a part; a killed rank loses
            no more.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        context: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        max_part_bytes: int = 64 << 20,
        max_seconds: float = 60.0,
    ) -> None:
        text = json.dumps(context, sort_keys=True, default=str)
        self._context = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self._prefix = self._context.hex()[:16]
        self._folder = folder
        self._key = key
        self._group = group
        self._is_zero = group is None or dist.get_rank(group) == 0
        self._max_part_bytes = max_part_bytes
        self._max_seconds = max_seconds
        self._first_added_seconds = 0.0
        self._unwritten: dict[bytes, Values] = {}
        self._num_unwritten_bytes = 0
        self._parts: dict[str, _Part] = {}
        self._skipped: set[str] = set()
        if self._is_zero:
            folder.mkdir(parents=True, exist_ok=True)
        self.reload()

    def __len__(self) -> int:
        return len(np.unique(self._sorted))

    def key_of(self, numbers_by_name: Mapping[str, Any]) -> bytes:
        """Returns a sample's key, 16 bytes: a hash of the context and of the sample's integers."""
        digest = hashlib.blake2b(self._context, digest_size=_NUM_BYTES_OF_KEY)
        for name, values in numbers_by_name.items():
            numbers = np.asarray(values, dtype=np.int64)
            digest.update(f"{name} {len(numbers)} ".encode())
            digest.update(numbers.tobytes())
        return digest.digest()

    def contains(self, keys: Sequence[bytes]) -> np.ndarray:
        """Returns True for each sample that is in the cache, [n]."""
        wanted = np.array(keys, dtype=_KEY)
        after = np.searchsorted(self._sorted, wanted, "right")
        found: np.ndarray = after > np.searchsorted(self._sorted, wanted)
        return found

    def find(self, keys: Sequence[bytes]) -> Values:
        """Reads the outputs of samples. Without keys, tensors have no rows; an empty cache has none.

        Raises KeyError with the position of the first sample that is not in the cache, and
        CheckpointError if outputs are corrupt.
        """
        is_known = self.contains(keys)
        if not is_known.all():
            raise KeyError(int(is_known.argmin()))
        # Of equal keys the first one counts, on all ranks.
        numbers = self._order[np.searchsorted(self._sorted, np.array(keys, dtype=_KEY))]
        parts = np.searchsorted(self._starts, numbers, "right") - 1
        opened = [*self._parts.values()]
        places = [
            (opened[p], int(n - self._starts[p])) for p, n in zip(parts, numbers, strict=True)
        ]
        total = sum(part.num_rows(number) for part, number in places)
        layout = opened[0].layout if opened else {}
        values = {
            name: torch.empty(total, *shape, dtype=dtype) for name, (dtype, shape) in layout.items()
        }
        end = 0
        for part, number in places:
            begin, end = end, end + part.num_rows(number)
            part.read(number, {name: rows[begin:end] for name, rows in values.items()})
        return values

    def add(self, keys: Sequence[bytes], num_rows: Sequence[int], values: Values) -> None:
        """Copies the outputs of new samples, and writes a part if they are large or old enough.

        For errors see :meth:`write`.
        """
        if not self._unwritten:
            self._first_added_seconds = time.monotonic()
        parts = {name: rows.split(list(num_rows)) for name, rows in values.items()}
        is_known = self.contains(keys)
        for number, key in enumerate(keys):
            if key in self._unwritten or is_known[number]:
                continue
            copies = {
                name: samples[number].detach().to("cpu", copy=True).contiguous()
                for name, samples in parts.items()
            }
            self._unwritten[key] = copies
            self._num_unwritten_bytes += sum(rows.nbytes for rows in copies.values())
        is_old = time.monotonic() - self._first_added_seconds > self._max_seconds
        if is_old or self._num_unwritten_bytes > self._max_part_bytes:
            self.write()

    def write(self) -> None:
        """Writes unwritten outputs as one part, atomically; :meth:`reload` opens it on other ranks.

        Raises OSError with the file's name if the part cannot be written; it is removed, and the
        outputs remain unwritten.
        """
        if not self._unwritten:
            return
        path = self._folder / f"{self._prefix}-{uuid.uuid4().hex[:16]}.safetensors"
        _write(path, self._unwritten)
        self._unwritten, self._num_unwritten_bytes = {}, 0
        self._index({**self._parts, path.name: _Part(path)})

    def _index(self, parts: dict[str, "_Part"]) -> None:
        """Sorts the keys of all parts, 24 bytes a key."""
        self._parts = parts
        keys = [part.keys for part in parts.values()]
        self._starts = np.cumsum([0, *map(len, keys)])
        together = np.concatenate([np.empty(0, _KEY), *keys])
        self._order = np.argsort(together, kind="stable")
        self._sorted = together[self._order]

    def reload(self) -> None:
        """Indexes the parts of all ranks and other trainings. All ranks together."""
        # One rank lists the folder and each reports its own parts: listings of network file systems may differ
        # between ranks, and the index must be equal on all of them.
        names = list(self._parts)
        if self._is_zero:
            names += [path.name for path in self._folder.glob(f"{self._prefix}-*.safetensors")]
        ranks = gather_objects(names, self._group)
        parts: dict[str, _Part] = {}
        damaged: dict[str, str] = {}
        for name in sorted(set().union(*ranks) - self._skipped):
            try:
                parts[name] = self._parts.get(name) or _Part(self._folder / name)
            except CheckpointError as error:
                damaged[name] = str(error)
        for others in gather_objects(damaged, self._group):
            damaged |= others
        parts = {name: part for name, part in parts.items() if name not in damaged}
        layout = next((part.layout for part in parts.values()), {})
        for name, part in parts.items():
            if part.layout != layout:
                damaged[name] = f"{part.path}: it contains other outputs than other parts"
        for problem in damaged.values() if self._is_zero else ():
            _log.warning(f"{self._key}: {problem}; skipped, its outputs are computed again")
        self._skipped |= damaged.keys()
        self._index({name: part for name, part in parts.items() if name not in damaged})


class _Part:
    """Open file of the cache. Raises CheckpointError if it is corrupt, or not a part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = TensorFile(path)
        index = [self._file.read(name) for name in _INDEX]
        layouts = {
            name.removeprefix(_VALUES): self._file.layout(name)
            for name in sorted(self._file.names())
            if name.startswith(_VALUES)
        }
        self.layout: _Layout = {
            name: (dtype, shape[1:]) for name, (dtype, shape) in layouts.items()
        }
        checksum = torch.tensor(_checksum(index, self.layout))
        if not torch.equal(self._file.read("index_crc32"), checksum):
            raise CheckpointError(f"{path}: it has another checksum than when it was written")
        _, num_rows, checksums = index
        self._first_rows: Any = np.concatenate([[0], np.cumsum(num_rows.numpy())])
        self._checksums: Any = checksums.numpy().astype(np.uint32)
        if any(shape[0] != self._first_rows[-1] for _, shape in layouts.values()):
            raise CheckpointError(f"{path}: its samples have other rows than its outputs")

    @property
    def keys(self) -> np.ndarray:
        """Keys of its samples [n], read from the file."""
        keys: np.ndarray = self._file.read("keys").numpy().view(_KEY).reshape(-1)
        return keys

    def num_rows(self, number: int) -> int:
        """Returns the number of rows of a sample."""
        return int(self._first_rows[number + 1] - self._first_rows[number])

    def read(self, number: int, into: Values) -> None:
        """Fills ``into``, [n, ...] by name. Raises CheckpointError if outputs are corrupt."""
        wanted = slice(self._first_rows[number], self._first_rows[number + 1])
        for name, rows in into.items():
            if len(rows):
                rows.copy_(self._file.read(_VALUES + name, (wanted,)))
        if _checksum_of_sample(into) != self._checksums[number]:
            raise CheckpointError(
                f"{self.path}: a sample's outputs have another checksum than when they were written; "
                "delete the file; the next start computes its outputs again"
            )


def _write(path: Path, samples: Mapping[bytes, Values]) -> None:
    outputs = list(samples.values())
    values = {name: torch.cat([each[name] for each in outputs]) for name in sorted(outputs[0])}
    index = [
        torch.frombuffer(bytearray(b"".join(samples)), dtype=torch.uint8).view(len(samples), -1),
        torch.tensor([len(next(iter(each.values()))) for each in outputs]),
        torch.tensor([_checksum_of_sample(each) for each in outputs]),
    ]
    layout = {name: (rows.dtype, tuple(rows.shape[1:])) for name, rows in values.items()}
    tensors = dict(zip(_INDEX, index, strict=True))
    tensors["index_crc32"] = torch.tensor(_checksum(index, layout))
    tensors |= {_VALUES + name: rows for name, rows in values.items()}
    write_tensors(path, tensors)


def _checksum_of_sample(values: Values) -> int:
    return _checksum([values[name] for name in sorted(values)])


def _checksum(tensors: Sequence[Tensor], layout: _Layout | None = None) -> int:
    """Returns the CRC-32 of tensors, without their dtypes, and of a layout."""
    checksum = zlib.crc32(str(sorted(layout.items())).encode()) if layout is not None else 0
    for tensor in tensors:
        content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(content, checksum)
    return checksum
