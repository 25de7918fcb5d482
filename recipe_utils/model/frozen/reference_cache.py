"""A reference's log-probabilities of pairs, kept on the disk from one training to the next.

They depend on a pair's tokens and labels and on the reference, but not on the learning rate, the loss, the
order of pairs or the number of ranks; so each pair is known by a hash of what they do depend on.
"""

import hashlib
import json
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

from recipe_utils.data.pairs.collator import digest_of
from recipe_utils.files import CheckpointError, TensorFile, replace_with_tensors
from recipe_utils.parallel.process_group import gather_objects

_log = get_logger("INFO")

_KEY = "S16"
_NUM_BYTES_OF_KEY = 16


class ReferenceCache:
    """What is known of one reference, the same on all ranks; in a folder that many trainings may share.

    A training has a file of its own, with what it has computed, which is replaced whole each time that it
    grows. Two trainings never write to the same file.

    Args:
        folder: made if need be.
        context: what log-probabilities depend on besides the pair, as plain values: weights, precision,
            layout of rows, kind of device.
        group: a CPU (gloo) group of all ranks. Rank 0 reads and writes.
    """

    def __init__(
        self, folder: Path, context: Mapping[str, Any], group: dist.ProcessGroup | None
    ) -> None:
        text = json.dumps(context, sort_keys=True, default=str)
        self._context = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self._group = group
        self._is_zero = group is None or dist.get_rank(group) == 0
        prefix = self._context.hex()[:16]
        self._path = folder / f"{prefix}-{uuid.uuid4().hex[:12]}.safetensors"
        self._own: list[tuple[np.ndarray, np.ndarray]] = []  # what this training has computed
        # What this rank has computed since the ranks told each other.
        self._new: dict[bytes, tuple[float, float]] = {}
        found = None
        if self._is_zero:
            folder.mkdir(parents=True, exist_ok=True)
            found = _merge([_read(path) for path in sorted(folder.glob(f"{prefix}-*.safetensors"))])
        # One value, so that the thread that looks pairs up never sees the half of a change.
        self._known: tuple[np.ndarray, np.ndarray] = gather_objects(found, group)[0]

    def __len__(self) -> int:
        return len(self._known[0])

    def key_of(self, pair: Mapping[str, Any]) -> bytes:
        """What a pair's log-probabilities are known by, 16 bytes."""
        return digest_of(pair, self._context)

    def find(self, keys: Sequence[bytes]) -> Tensor:
        """Log-probabilities of each chosen and each rejected answer, [2, p] in fp64; NaN where not known."""
        known_keys, log_probs = self._known
        found = np.full((len(keys), 2), np.nan)
        if len(known_keys):
            wanted = np.array(keys, dtype=_KEY)
            places = np.searchsorted(known_keys, wanted).clip(max=len(known_keys) - 1)
            is_known = known_keys[places] == wanted
            found[is_known] = log_probs[places[is_known]]
        return torch.from_numpy(found.T.copy())

    def add(self, keys: Sequence[bytes], log_probs: Tensor) -> None:
        """Takes what this rank has computed, [2, p]."""
        self._new.update(zip(keys, map(tuple, log_probs.T.tolist()), strict=True))

    def share(self) -> None:
        """Tells all ranks what each has computed, and writes it to the disk. All ranks together."""
        of_ranks = gather_objects(_arrays_of(self._new), self._group)
        self._new = {}
        computed = _merge(of_ranks)
        if not len(computed[0]):
            return
        self._known = _merge([self._known, computed])
        if self._is_zero:
            self._own.append(computed)
            try:
                _write(self._path, _merge(self._own))
            except OSError as error:
                _log.warning(
                    f"reference_cache_dir: {error}; the log-probabilities stay in memory, a later training "
                    "computes them again"
                )


def _arrays_of(entries: Mapping[bytes, tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    keys = np.array(list(entries), dtype=_KEY)
    return keys, np.array(list(entries.values()), dtype=np.float64).reshape(-1, 2)


def _merge(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted keys, each once, and their values; of equal keys the first one's."""
    if not parts:
        return _arrays_of({})
    keys, first = np.unique(np.concatenate([keys for keys, _ in parts]), return_index=True)
    return keys, np.concatenate([values for _, values in parts])[first]


def _write(path: Path, entries: tuple[np.ndarray, np.ndarray]) -> None:
    keys, values = entries
    tensors = {
        "keys": torch.frombuffer(bytearray(keys.tobytes()), dtype=torch.uint8).view(
            -1, _NUM_BYTES_OF_KEY
        ),
        "log_probs": torch.from_numpy(values),
        "crc32": torch.tensor([_checksum(keys, values)]),
    }
    replace_with_tensors(path, tensors)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """What a file holds; nothing, with a warning, if it is damaged or something else."""
    try:
        file = TensorFile(path)
        raw, values = file.read("keys").numpy(), file.read("log_probs").numpy()
        keys = np.frombuffer(raw.tobytes(), dtype=_KEY)
        if raw.dtype != np.uint8 or values.dtype != np.float64 or values.shape != (len(keys), 2):
            raise CheckpointError(f"{path}: it holds something else")
        if int(file.read("crc32")) != _checksum(keys, values):
            raise CheckpointError(f"{path}: its checksum is another one")
    except (CheckpointError, ValueError, TypeError, AttributeError) as error:
        _log.warning(f"reference_cache_dir: {error}; passed over, what it held is computed again")
        return _arrays_of({})
    return keys, values


def _checksum(keys: np.ndarray, values: np.ndarray) -> int:
    return zlib.crc32(values.tobytes(), zlib.crc32(keys.tobytes()))
