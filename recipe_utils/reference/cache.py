"""Disk cache of a reference: log-probabilities of sequences, in one file.

Example: with 60,000 pairs ``reference/9f86d081884c7d65.npz`` has 120,000 sequences, 3.8 MB: their fingerprints (16 bytes
each), the numbers of their values (8 bytes each), and all values in fp64: the sum of an answer, or a log-probability for
each of its targets. The name is a hash of what they depend on besides the sequence, such as the reference's weights; not
the learning rate, the loss, the order of samples or the number of ranks.
"""

import hashlib
import json
import time
import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recipe_utils.files import CheckpointError, write_atomically
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.settings.problems import naming
from recipe_utils.torchtune_names import logger

_SECONDS_BETWEEN_WRITES = 60.0
"""A killed run loses no more of its pass before training."""


class Sequences(NamedTuple):
    """Sequences of a microbatch."""

    names: Sequence[str]
    """Names of their samples, for errors."""
    fingerprints: Sequence[bytes]
    """Hashes of their tokens and labels, 16 bytes each."""


LogProbs = dict[bytes, bytes]
"""Log-probabilities [k] of a sequence [nats], fp64 in little-endian order, by its fingerprint."""


class ReferenceCache:
    """Log-probabilities of one reference, the same on all ranks, in a folder that trainings may share.

    Rank 0 reads and writes the file. Takes about 150 bytes of memory per sequence, and 8 per value. ``context`` are plain
    values that log-probabilities depend on besides the sequence, ``group`` a CPU (gloo) group of all ranks.
    """

    def __init__(self, folder: Path, context: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
        text = json.dumps(context, sort_keys=True, default=str)
        self._path = folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.npz"
        self._is_zero = group is None or dist.get_rank(group) == 0
        if self._is_zero:
            folder.mkdir(parents=True, exist_ok=True)
        self._log_probs: LogProbs = gather_objects(self._read() if self._is_zero else {}, group)[0]
        self._num_written, self._written_seconds = len(self._log_probs), time.monotonic()

    def __len__(self) -> int:
        return len(self._log_probs)

    def contains(self, sequences: Sequences) -> bool:
        """Returns True if the log-probabilities of all sequences are known."""
        return self._log_probs.keys() >= {*sequences.fingerprints}

    def find(self, sequences: Sequences) -> Tensor:
        """Returns log-probabilities [n], fp64, one sequence after the other.

        Raises CheckpointError with the name of the sample of an unknown one.
        """
        for name, fingerprint in zip(*sequences, strict=True):
            if fingerprint not in self._log_probs:
                raise CheckpointError(
                    f"reference_cache_dir={self._path.parent}: {name} is not in the cache, because the dataset did "
                    "not return it in the pass before training; set reference to live or offload"
                )
        joined = bytearray().join(self._log_probs[fingerprint] for fingerprint in sequences.fingerprints)
        return torch.frombuffer(joined, dtype=torch.float64) if joined else torch.zeros(0, dtype=torch.float64)

    def add(self, log_probs: LogProbs) -> None:
        """Adds new sequences, the same on all ranks, and writes them if the last write was long ago."""
        for fingerprint, values in log_probs.items():
            self._log_probs.setdefault(fingerprint, values)
        if time.monotonic() - self._written_seconds > _SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """Writes all sequences on rank 0, atomically, with those that other trainings have written since.

        Raises ConfigError with the file's name.
        """
        if self._is_zero and len(self._log_probs) > self._num_written:
            content, rows = BytesIO(), self._read() | self._log_probs
            numbers = np.array([len(values) // 8 for values in rows.values()])
            fingerprints, values = np.frombuffer(b"".join(rows), "V16"), np.frombuffer(b"".join(rows.values()))
            np.savez(content, fingerprints=fingerprints, numbers=numbers, values=values)
            with naming("reference_cache_dir"):
                write_atomically(self._path, content.getvalue())
            self._num_written, self._written_seconds = len(self._log_probs), time.monotonic()

    def _read(self) -> LogProbs:
        if not self._path.is_file():
            return {}
        try:
            with np.load(self._path) as file:  # with a checksum of each array
                fingerprints, ends = file["fingerprints"].tolist(), file["numbers"].cumsum()
                values = [each.tobytes() for each in np.split(file["values"], ends[:-1])]
        except (zipfile.BadZipFile, KeyError, ValueError, EOFError):
            logger.warning(f"{self._path}: corrupt; its log-probabilities are computed again")
            return {}
        return dict(zip(fingerprints, values, strict=True))
