"""Memory of a training's update steps: search for their budget, and recovery from out-of-memory errors."""

import gc
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from recipe_utils.memory import out_of_memory
from recipe_utils.memory.out_of_memory import ONE_SAMPLE, OutOfMemory, RowsDoNotFitError
from recipe_utils.memory.search import BudgetSearch
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import ConfigError, Problem

T = TypeVar("T")

_OF_OPTIMIZER = (
    "it was in the optimizer's step, so shorter rows do not help; set an optimizer with less state "
    "(recipe_utils.optim.AdamW8bit), fsdp_cpu_offload=True, or more ranks"
)


class StepMemory:
    """Memory of a training's update steps.

    With ``max_tokens_per_microbatch: auto`` each one is measured. One that runs out of memory is repeated in
    shorter rows by one rank without sharding. Otherwise the training ends with a record, from which its next
    start lowers the bound of rows.

    Args:
        loader: loader of the training.
        model: model of this rank.
        optimizer: its optimizer. Until it steps, an update step changes nothing but gradients.
        ranks: ranks of the job.
        config: keys that memory depends on; a record with other ones has no effect.
        log: log of the run.
    """

    def __init__(
        self,
        loader: Any,
        model: nn.Module,
        optimizer: Any,
        ranks: Ranks,
        config: Mapping[str, Any],
        log: Any,
    ) -> None:
        self._loader, self._settings, self._ranks = loader, loader.settings, ranks
        self._optimizer, self._log = optimizer, log
        self._config = json.loads(json.dumps(config))
        self._folder = Path(loader.settings.output_dir)
        self._search = None
        if loader.settings.finds_budget:
            self._search = BudgetSearch(loader, ranks, log.info)
        self._step: Any = None  # in progress
        self._is_stepping = False
        # FSDP2's state and the stash of offloaded activations cannot be reset within a backward.
        has_hooks = hasattr(optimizer, "register_step_pre_hook")
        self._can_repeat = (
            has_hooks
            and self._settings.plans_by_tokens
            and not self._settings.enable_activation_offloading
            and not any(isinstance(module, FSDPModule) for module in model.modules())
        )
        if has_hooks:
            optimizer.register_step_pre_hook(lambda *_: setattr(self, "_is_stepping", True))

    def restore(self, saved: Mapping[str, Any], is_new: bool) -> None:
        """Bounds rows by the budget of a checkpoint, and by the record of an earlier start.

        A new training removes the record. Raises ConfigError if the recorded row is a sample by itself.
        """
        if self._search is not None:
            self._search.restore(saved)
        self._lower_rows(is_new)
        self._loader.in_use = self._loader.max_tokens

    def _lower_rows(self, is_new: bool) -> None:
        record = None if is_new else out_of_memory.read(self._folder)
        if is_new and self._ranks.is_zero:
            (self._folder / out_of_memory.FILE).unlink(missing_ok=True)
        of_ranks = gather_objects(record, self._ranks.cpu_group)
        here = self._ranks.world_size, self._config
        found = [each for each in of_ranks if each and (each.world_size, each.config) == here]
        if not found:
            return
        record = min(found, key=lambda each: each.tokens)
        if record.is_one_sample:
            text = f"{record}; {ONE_SAMPLE}. If something else took the memory, delete"
            path = self._folder / out_of_memory.FILE
            raise ConfigError(Problem("max_tokens_per_microbatch", f"{text} {path}"))
        loader, most = self._loader, record.lowered
        bound = loader.max_tokens or self._settings.max_tokens_per_microbatch or most
        loader.most_tokens = most
        loader.bound_rows(min(bound, most))
        text = f"rows have at most {loader.max_tokens:,} from here on, with the same losses"
        self._log.warn(f"max_tokens_per_microbatch: {record}; {text}")

    def start(self, step: Any, number: int) -> None:
        """Starts an update step."""
        self._step, self._number, self._is_stepping = step, number, False
        if self._search is not None:
            self._search.start(step, number)
        self._loader.in_use = step.max_tokens

    def retrying(self, update: Callable[[Any], T], step: Any) -> T:
        """Returns ``update(step)``; a single rank without sharding repeats it in shorter rows if out of memory.

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
            self._log.warn(f"{record}; repeated with at most {most:,}, with the same gradient")
            if self._search is not None:
                self._search.start_again()

    def stop(self, step: Any) -> Any:
        """Ends an enqueued update step; returns it as it was made, possibly in shorter rows."""
        made, self._step = self._step or step, None
        if self._search is not None:
            self._search.stop(made, self._number)
        return made

    def state(self) -> dict[str, Any]:
        """Returns the budget for a checkpoint; {} if none is searched for."""
        return {} if self._search is None else self._search.state()

    def metrics(self) -> dict[str, float]:
        """Returns budget and peak of the last update step on this rank; {} if none is searched for."""
        return {} if self._search is None else self._search.metrics()

    def __enter__(self) -> "StepMemory":
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        """Records an update step that ran out of memory, and raises RowsDoNotFitError."""
        if not isinstance(error, torch.OutOfMemoryError) or self._step is None:
            return
        record = self._record()
        how = f"the next start has rows of at most {record.lowered:,}, with the same losses"
        if self._is_stepping:
            how = _OF_OPTIMIZER
        elif not self._settings.plans_by_tokens:
            how = "set microbatching=packed, or " * bool(record.tokens) + "a smaller batch_size"
        else:
            with suppress(OSError):
                record.write(self._folder)
            if record.is_one_sample:
                how = ONE_SAMPLE
        raise RowsDoNotFitError(f"{record}; {how}") from error

    def _record(self) -> OutOfMemory:
        device, bound = self._ranks.device, self._step.max_tokens  # includes padding
        configured = self._settings.max_tokens_per_microbatch
        if bound is None and isinstance(configured, int):
            multiple = self._loader.collator.row_multiple or 1
            bound = -(-configured // multiple) * multiple
        return OutOfMemory(
            tokens=self._step.longest,
            max_tokens=bound,
            peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            update_step=self._number,
            rank=dist.get_rank(),
            world_size=self._ranks.world_size,
            config=self._config,
        )
