"""Record of an update step that ran out of memory, for the next start of the training."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipe_utils.files import write_atomically

FILE = "out_of_memory.json"
_LOWER = 0.85
"""Factor of the tokens of a row that did not fit."""
ONE_SAMPLE = (
    "a row is one sample there; set enable_activation_checkpointing=True, max_ranks_per_row=2 (packed), or a "
    "smaller tokenizer.max_seq_len"
)
"""Advice for a row that no bound makes shorter."""


class RowsDoNotFitError(RuntimeError):
    """An update step ran out of memory; the next start of the training plans smaller rows."""


@dataclass(frozen=True)
class OutOfMemory:
    """Update step that ran out of memory on a rank."""

    tokens: int
    """Positions of its longest row on the rank."""
    max_tokens: int | None
    """Most positions of a row with more than one sample, padding included."""
    peak_bytes: int
    update_step: int
    rank: int
    world_size: int
    config: Mapping[str, Any]
    """Keys that memory depends on."""

    @property
    def lowered(self) -> int:
        """Returns the bound of further rows [tokens]."""
        return int(_LOWER * self.tokens)

    @property
    def is_one_sample(self) -> bool:
        """Returns True if the row is a sample by itself, which no bound makes shorter."""
        return self.max_tokens is not None and self.tokens > self.max_tokens

    def __str__(self) -> str:
        peak = f" (peak {self.peak_bytes / 2**30:.1f} GiB)" if self.peak_bytes else ""
        rows = f", at rows of {self.tokens:,} tokens" if self.tokens else ""
        return f"rank {self.rank} ran out of memory in update step {self.update_step}{rows}{peak}"

    def write(self, folder: Path) -> None:
        """Writes the record atomically; of several ranks' records one is kept."""
        own = folder / f".{self.rank}.{FILE}"
        write_atomically(own, json.dumps(asdict(self), indent=1))
        os.replace(own, folder / FILE)


def read(folder: Path) -> OutOfMemory | None:
    """Returns the record of an output folder; None if there is none."""
    try:
        return OutOfMemory(**json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
