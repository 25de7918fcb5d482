"""Memory of a training's update steps: search for their budget, and advice after out-of-memory errors."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from recipe_utils.memory.search import BudgetSearch
from recipe_utils.parallel.ranks import Ranks

_SAFE = 0.85
"""Factor of the tokens of a row that did not fit."""
_OF_OPTIMIZER = (
    "it was in the optimizer's step, so shorter rows do not help; set an optimizer with less state "
    "(recipe_utils.optim.AdamW8bit), fsdp_cpu_offload=True, or more ranks"
)
_OF_ONE_SAMPLE = (
    "a row is one sample there; set enable_activation_checkpointing=True, max_ranks_per_row=2 (packed), or a "
    "smaller tokenizer.max_seq_len"
)


class RowsDoNotFitError(RuntimeError):
    """An update step ran out of memory."""


class StepMemory:
    """Memory of a training's update steps.

    With ``max_tokens_per_microbatch: auto`` each one is measured. As a context manager it replaces an
    out-of-memory error of an update step by RowsDoNotFitError, which names the row and the key to set.

    Args:
        loader: loader of the training.
        optimizer: its optimizer.
        ranks: ranks of the job.
        log: log of the run.
    """

    def __init__(self, loader: Any, optimizer: Any, ranks: Ranks, log: Any) -> None:
        self._loader, self._settings, self._ranks = loader, loader.settings, ranks
        self._search = BudgetSearch(loader, ranks, log.info) if loader.max_tokens else None
        self._step: Any = None  # in progress
        self._is_stepping = False
        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(lambda *_: setattr(self, "_is_stepping", True))

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continues with the budget of a checkpoint."""
        if self._search is not None:
            self._search.restore(saved)

    def start(self, step: Any, number: int) -> None:
        """Starts an update step."""
        self._step, self._number, self._is_stepping = step, number, False
        if self._search is not None:
            self._search.start()

    def stop(self, step: Any) -> None:
        """Ends an enqueued update step."""
        self._step = None
        if self._search is not None:
            self._search.stop(step, self._number)

    def state(self) -> dict[str, Any]:
        """Returns the budget for a checkpoint; {} if none is searched for."""
        return {} if self._search is None else self._search.state()

    def metrics(self) -> dict[str, float]:
        """Returns budget and peak of the last update step on this rank; {} if none is searched for."""
        return {} if self._search is None else self._search.metrics()

    def __enter__(self) -> "StepMemory":
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        """Raises RowsDoNotFitError if an update step ran out of memory."""
        if isinstance(error, torch.OutOfMemoryError) and self._step is not None:
            device, tokens = self._ranks.device, self._step.longest
            text = f"rank {dist.get_rank()} ran out of memory in update step {self._number}"
            if tokens:
                text += f", at rows of {tokens:,} tokens"
            if device.type == "cuda":
                text += f" (peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB)"
            raise RowsDoNotFitError(f"{text}; {self._advice(tokens)}") from error

    def _advice(self, tokens: int) -> str:
        if self._is_stepping:
            return _OF_OPTIMIZER
        if not self._settings.plans_by_tokens:
            return f"set {'microbatching=packed, or ' * bool(tokens)}a smaller batch_size"
        collator, bound = self._loader.collator, self._settings.max_tokens_per_microbatch
        if self._search is not None:
            bound = self._search.budget.largest
        elif bound is not None:
            multiple = collator.row_multiple or 1
            bound = -(-bound // multiple) * multiple  # rows are padded
        if bound is not None and tokens > bound:  # no bound makes it shorter
            return _OF_ONE_SAMPLE
        safe = collator.with_bound(int(_SAFE * tokens)).settings.max_tokens_per_microbatch
        return f"set max_tokens_per_microbatch={safe}, with which a resume has the same losses"
