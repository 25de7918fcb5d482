"""Memory of a training's update steps: search for their budget, and advice after out-of-memory errors."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_utils.checkpoint.tensors import AnyOptimizer
from recipe_utils.data.meter import METERS
from recipe_utils.data.search import SearchedBudget, advice_for
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.plans.microbatching import MOST_TOKENS
from recipe_utils.training.parts.protocol import Part
from recipe_utils.training.run import Run
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.step import UpdateStep

_OF_OPTIMIZER = (
    "it was in the optimizer's step, so shorter rows do not help; set an optimizer with less state "
    "(recipe_utils.optim.AdamW8bit), fsdp_cpu_offload=True, or more ranks"
)


class RowsDoNotFitError(RuntimeError):
    """An update step ran out of memory."""


class StepMemory(Part):
    """Memory of a training's update steps.

    With ``max_tokens_per_microbatch: auto`` each one is measured, and the loader plans with the least proposal
    of all ranks. Its ``close`` replaces an out-of-memory error of an update step by RowsDoNotFitError, which
    names the row and the key to set.
    """

    def __init__(self, run: Run, loader: UpdateStepLoader, optimizer: AnyOptimizer) -> None:
        self._run, self._budget, self._ranks = run, loader.budget, run.ranks
        self._search = loader.budget if isinstance(loader.budget, SearchedBudget) else None
        self._step: UpdateStep | None = None  # in progress
        self._is_stepping = False
        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(lambda *_: setattr(self, "_is_stepping", True))
        if self._search is not None:
            self._meter = METERS[run.ranks.device.type](run.ranks.device)
            self._hardware = {"memory_bytes": self._meter.total_bytes, "world_size": run.ranks.world_size}
            self._logged = self._search.tokens

    def load(self, state: Mapping[str, Any]) -> None:
        """Continues with the budget of a checkpoint if it was found on the same hardware."""
        if self._search is not None:
            is_same = self._hardware.items() <= state.items()
            if all(gather_objects(is_same, self._ranks.cpu_group)):
                self._search.restart(state["tokens"])
                self._logged = self._search.tokens

    def state(self) -> dict[str, Any]:
        """Returns the budget for a checkpoint; {} if none is searched for."""
        if self._search is None:
            return {}
        return {"tokens": self._search.tokens, **self._hardware}

    def before(self, step: UpdateStep) -> None:
        """Starts an update step."""
        self._step, self._number, self._is_stepping = step, self._run.global_step + 1, False
        if self._search is not None:
            self._meter.start()

    def after(self, step: UpdateStep) -> dict[str, float]:
        """Ends an enqueued update step, and proposes a budget for those not yet planned.

        Returns the budget of the next rows and this rank's peak; {} if no budget is searched for.
        """
        self._step = None
        if self._search is None:
            return {}
        memory, longest, tokens = self._meter.stop(), longest_row(step), self._search.tokens
        if tokens != self._logged:
            took = f"{longest:,} took {memory.peak / 2**30:.2f} of {memory.limit / 2**30:.2f} GiB"
            self._run.log.info(f"update step {self._number}: next rows have up to {tokens:,} tokens ({took})")
            self._logged = tokens
        if memory.has_retried:
            text = "the allocator had to free cached blocks; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            self._run.log.info(f"update step {self._number}: {text} lowers fragmentation")
        # One microbatch needs no longer rows, and had no gradients beside its activations.
        cap = MOST_TOKENS if len(step.microbatches) > 1 else 0
        if (num_stages := self._ranks.dims.pp) > 1:
            # Two microbatches for each stage keep the bubble small.
            positions = sum(m.counts.get("positions", 0) for m in step.microbatches)
            cap = int(positions) // (2 * num_stages)
        if self._number > 1:  # the first one has no optimizer state
            self._search.search.add(longest, memory, cap)
        return {"max_tokens_per_microbatch": tokens, "peak_memory_gib": memory.peak / 2**30}

    def close(self, error: BaseException | None) -> None:
        """Raises RowsDoNotFitError if an update step ran out of memory."""
        if isinstance(error, torch.OutOfMemoryError) and self._step is not None:
            device, tokens = self._ranks.device, longest_row(self._step)
            text = f"rank {dist.get_rank()} ran out of memory in update step {self._number}"
            if tokens:
                text += f", at rows of {tokens:,} tokens"
            if device.type == "cuda":
                text += f" (peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB)"
            advice = _OF_OPTIMIZER if self._is_stepping else advice_for(self._budget, tokens)
            raise RowsDoNotFitError(f"{text}; {advice}") from error


def longest_row(step: UpdateStep) -> int:
    """Returns the most positions of a microbatch, or share of one, on this rank; 0 for inputs that are not [b, s]."""
    rows = [microbatch.inputs.get("tokens") for microbatch in step.microbatches]
    return max((row.numel() for row in rows if isinstance(row, Tensor) and row.dim() == 2), default=0)
