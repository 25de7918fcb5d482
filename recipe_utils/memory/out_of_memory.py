"""Update steps that run out of memory: repeated in shorter rows, or recorded for the next start."""

import gc
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from recipe_utils.files import write_atomically
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import ConfigError, Problem

T = TypeVar("T")

FILE = "out_of_memory.json"
_LOWER = 0.85
"""Factor of the tokens of a row that did not fit."""
_ONE_SAMPLE = (
    "a row is one sample there; set enable_activation_checkpointing=True, max_ranks_per_row=2 (packed), or a "
    "smaller tokenizer.max_seq_len"
)


class RowsDoNotFitError(RuntimeError):
    """An update step ran out of memory; the next start of the training plans smaller rows."""


@dataclass(frozen=True)
class OutOfMemory:
    """Update step that ran out of memory on a rank."""

    tokens: int
    """Positions of its longest row on the rank."""
    max_tokens: int | None
    """Bound of a row with more than one sample."""
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
        text = f"rank {self.rank} ran out of memory in update step {self.update_step}"
        return f"{text}, at rows of {self.tokens:,} tokens{peak}"

    def write(self, folder: Path) -> None:
        """Writes the record atomically; of several ranks' records one is kept."""
        own = folder / f".{self.rank}.{FILE}"
        write_atomically(own, json.dumps(asdict(self), indent=1))
        os.replace(own, folder / FILE)


def _read(folder: Path) -> OutOfMemory | None:
    try:
        return OutOfMemory(**json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


class LackOfMemory:
    """Reaction of a training to update steps that run out of memory.

    One rank without sharding repeats the update step in shorter rows. Otherwise the training ends with a
    record, from which its next start lowers the bound of rows.

    Args:
        loader: loader of the training.
        ranks: ranks of the job.
        config: keys that memory depends on; a record with other ones has no effect.
        log: logs a line on rank 0.
    """

    def __init__(
        self,
        loader: Any,
        ranks: Ranks,
        config: Mapping[str, Any],
        log: Callable[[str], None],
    ) -> None:
        self._loader, self._settings, self._ranks = loader, loader.settings, ranks
        self._config, self._log = json.loads(json.dumps(config)), log
        self._folder = Path(loader.settings.output_dir)
        self._step: Any = None  # in progress
        self._is_stepping = False
        self.before_repeat: Callable[[], None] = lambda: None
        """Called before an update step is repeated."""

    def watch(self, model: nn.Module, optimizer: Any) -> None:
        """Takes what an update step changes. Until the optimizer steps, that is gradients only.

        FSDP2's state and the stash of offloaded activations cannot be reset within a backward.
        """
        self._optimizer = optimizer
        self._can_repeat = (
            self._settings.plans_by_tokens
            and not self._settings.enable_activation_offloading
            and not any(isinstance(module, FSDPModule) for module in model.modules())
            and hasattr(optimizer, "register_step_pre_hook")
        )
        if self._can_repeat:
            optimizer.register_step_pre_hook(lambda *_: setattr(self, "_is_stepping", True))

    def lower_rows(self, is_new: bool) -> None:
        """Lowers the bound of rows by the record of an earlier start; of a new training, removes it.

        Raises ConfigError if the recorded row is a sample by itself.
        """
        record = None if is_new else _read(self._folder)
        if is_new and self._ranks.is_zero:
            (self._folder / FILE).unlink(missing_ok=True)
        of_ranks = gather_objects(record, self._ranks.cpu_group)
        here = self._ranks.world_size, self._config
        found = [each for each in of_ranks if each and (each.world_size, each.config) == here]
        if not found:
            return
        record = min(found, key=lambda each: each.tokens)
        if record.is_one_sample:
            raise ConfigError(Problem("max_tokens_per_microbatch", f"{record}; {_ONE_SAMPLE}"))
        loader, most = self._loader, record.lowered
        bound = loader.max_tokens or self._settings.max_tokens_per_microbatch or most
        loader.most_tokens = most
        loader.bound_rows(min(bound, most))
        text = f"rows have at most {loader.max_tokens:,} from here on, with the same losses"
        self._log(f"max_tokens_per_microbatch: {record}; {text}")

    def start(self, step: Any, number: int) -> None:
        """Starts an update step."""
        self._step, self._number, self._is_stepping = step, number, False

    def stop(self, step: Any) -> Any:
        """Ends an update step; returns it as it was made, possibly in shorter rows."""
        made, self._step = self._step, None
        return made or step

    def retrying(self, update: Callable[[Any], T], step: Any) -> T:
        """Returns ``update(step)``, which one rank without sharding repeats in shorter rows if memory lacks.

        All gradients are computed again, so no microbatch counts twice.
        """
        while True:
            if step.samples is not None and step.longest > self._loader.most_tokens:
                self._step = step = self._loader.planned_again(step, self._loader.most_tokens)
            try:
                return update(step)
            except torch.OutOfMemoryError:
                record = self._record()
                is_safe = self._can_repeat and step.samples is not None and not self._is_stepping
                if not is_safe or record.is_one_sample:
                    raise
            # Outside of the except block, whose traceback holds the activations.
            self._optimizer.zero_grad(set_to_none=True)
            gc.collect()  # recomputation leaves cycles
            if self._ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            self._loader.most_tokens = most = record.tokens // 2
            self._log(f"{record}; repeated with at most {most:,}, with the same gradient")
            self.before_repeat()

    def explain(self, _: Any, error: BaseException | None, __: Any) -> None:
        """Exit callback: records an update step that ran out of memory, and raises RowsDoNotFitError."""
        if not isinstance(error, torch.OutOfMemoryError) or self._step is None:
            return
        record = self._record()
        how = f"the next start has rows of at most {record.lowered:,}, with the same losses"
        if not self._settings.plans_by_tokens:
            how = "set microbatching=packed, or a smaller batch_size"
        else:
            with suppress(OSError):
                record.write(self._folder)
            if record.is_one_sample:
                how = _ONE_SAMPLE
        raise RowsDoNotFitError(f"{record}; {how}") from error

    def _record(self) -> OutOfMemory:
        device, bound = self._ranks.device, self._settings.max_tokens_per_microbatch
        return OutOfMemory(
            tokens=self._step.longest,
            max_tokens=self._step.max_tokens or (None if bound == "auto" else bound),
            peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            update_step=self._number,
            rank=dist.get_rank(),
            world_size=self._ranks.world_size,
            config=self._config,
        )
