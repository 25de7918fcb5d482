"""Disk cache of a reference: two log-probabilities of each pair, in one file.

Example: with 60,000 pairs ``reference/9f86d081884c7d65.pairs`` has 4 bytes of checksum and 60,000 rows of 32
bytes, 1.9 MB. A row is a pair's fingerprint (16 bytes) and the log-probabilities of its chosen and rejected
answer in fp64. The name is a hash of what they depend on besides the pair, such as the reference's weights; not
the learning rate, the loss, the order of pairs or the number of ranks.
"""

import hashlib
import json
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_utils.files import CheckpointError, write_atomically
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.settings.problems import naming
from recipe_utils.torchtune_names import logger

_ROW = struct.Struct("<16sdd")
_SECONDS_BETWEEN_WRITES = 60.0
"""A killed run loses no more of its pass before training."""


class Pairs(NamedTuple):
    """Pairs of a microbatch."""

    names: Sequence[str]
    """Their names, for errors."""
    fingerprints: Sequence[bytes]
    """Hashes of their tokens and labels, 16 bytes each."""


LogProbs = dict[bytes, tuple[float, float]]
"""Log-probabilities of the chosen and the rejected answer [nats], by the pair's fingerprint."""


class ReferenceCache:
    """Log-probabilities of one reference, the same on all ranks, in a folder that trainings may share.

    Rank 0 reads and writes the file. Takes about 300 bytes of memory per pair. ``context`` are plain values that
    log-probabilities depend on besides the pair, ``group`` a CPU (gloo) group of all ranks.
    """

    def __init__(self, folder: Path, context: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
        text = json.dumps(context, sort_keys=True, default=str)
        self._path = folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.pairs"
        self._is_zero = group is None or dist.get_rank(group) == 0
        if self._is_zero:
            folder.mkdir(parents=True, exist_ok=True)
        self._log_probs: LogProbs = gather_objects(self._read() if self._is_zero else {}, group)[0]
        self._num_written, self._written_seconds = len(self._log_probs), time.monotonic()

    def __len__(self) -> int:
        return len(self._log_probs)

    def contains(self, pairs: Pairs) -> bool:
        """Returns True if the log-probabilities of all pairs are known."""
        return self._log_probs.keys() >= {*pairs.fingerprints}

    def find(self, pairs: Pairs) -> Tensor:
        """Returns log-probabilities [2, p], fp64. Raises CheckpointError with the name of an unknown pair."""
        for name, fingerprint in zip(pairs.names, pairs.fingerprints, strict=True):
            if fingerprint not in self._log_probs:
                raise CheckpointError(
                    f"reference_cache_dir={self._path.parent}: {name} is not in the cache, because the dataset did "
                    "not return it in the pass before training; set reference to live or offload"
                )
        rows = [self._log_probs[fingerprint] for fingerprint in pairs.fingerprints]
        return torch.tensor(rows, dtype=torch.float64).view(-1, 2).T

    def add(self, log_probs: LogProbs) -> None:
        """Adds new pairs, the same on all ranks, and writes them if the last write was long ago."""
        for fingerprint, both in log_probs.items():
            self._log_probs.setdefault(fingerprint, both)
        if time.monotonic() - self._written_seconds > _SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """Writes all pairs on rank 0, atomically, with those that other trainings have written since.

        Raises ConfigError with the file's name.
        """
        if self._is_zero and len(self._log_probs) > self._num_written:
            rows = self._read() | self._log_probs
            content = b"".join(_ROW.pack(fingerprint, *both) for fingerprint, both in rows.items())
            with naming("reference_cache_dir"):
                write_atomically(self._path, zlib.crc32(content).to_bytes(4, "little") + content)
            self._num_written, self._written_seconds = len(self._log_probs), time.monotonic()

    def _read(self) -> LogProbs:
        if not self._path.is_file():
            return {}
        data = self._path.read_bytes()
        checksum, content = int.from_bytes(data[:4], "little"), data[4:]
        if len(data) < 4 or zlib.crc32(content) != checksum or len(content) % _ROW.size:
            logger.warning(f"{self._path}: corrupt; its log-probabilities are computed again")
            return {}
        return {key: (chosen, rejected) for key, chosen, rejected in _ROW.iter_unpack(content)}
