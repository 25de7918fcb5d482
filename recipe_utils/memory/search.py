"""Search for the budget of a training's microbatches: measures update steps, agrees, and logs."""

from collections.abc import Callable, Mapping
from typing import Any

from recipe_utils.memory.budget import MOST_TOKENS, Measured, TokenBudget
from recipe_utils.memory.meter import METERS
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks


class BudgetSearch:
    """Budget of a training with ``max_tokens_per_microbatch: auto``.

    Args:
        loader: loader of the training, which plans with the least proposal of all ranks.
        ranks: ranks of the job.
        log: logs a line on rank 0.
    """

    def __init__(self, loader: Any, ranks: Ranks, log: Callable[[str], None]) -> None:
        settings = loader.settings
        self._loader, self._ranks, self._log = loader, ranks, log
        self._meter = METERS[ranks.device.type](ranks.device)
        self._budget = TokenBudget(
            loader.max_tokens, num_delayed=settings.prefetch_update_steps + 2
        )
        if loader.collator.has_few_lengths:  # for which kernels are compiled
            self._budget.num_digits = 1
        # Two microbatches for each stage keep the bubble small.
        self._num_stages = settings.pipeline_parallel_dim
        self._memory: Measured | None = None
        self._tokens = self._longest = 0  # budget and longest microbatch of the last update step
        self._untimed: tuple[int, int, Callable[[], float]] | None = None
        loader.propose_tokens = lambda: self._budget.proposal

    @property
    def _hardware(self) -> dict[str, int]:
        return {"memory_bytes": self._meter.total_bytes, "world_size": self._ranks.world_size}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continues with the budget of a checkpoint if it was found on the same hardware."""
        is_same = self._hardware.items() <= saved.items()
        if not all(gather_objects(is_same, self._ranks.cpu_group)):
            return
        self._budget.start_at(saved["tokens"], saved["is_settled"])
        self._loader.bound_rows(saved["tokens"])

    def state(self) -> dict[str, Any]:
        """Returns the budget for a checkpoint."""
        is_settled = self._budget.is_settled
        tokens = self._budget.proposal if is_settled else self._loader.in_use
        return {"tokens": tokens, "is_settled": is_settled, **self._hardware}

    def start(self, step: Any, number: int) -> None:
        """Starts an update step."""
        tokens, memory = step.max_tokens, self._memory
        if memory is not None and tokens != self._loader.in_use:
            taken = f"{self._longest:,} took {memory.peak / 2**30:.2f} of {memory.limit / 2**30:.2f} GiB"
            self._log(f"update step {number}: rows of up to {tokens:,} tokens from here ({taken})")
        if number > 1 and number - 1 in self._loader.batch_sizes:
            self._budget.search_again()  # a larger update step may fill larger rows
        self._meter.start()

    def stop(self, step: Any, number: int) -> None:
        """Measures an enqueued update step, and proposes a budget for those not yet planned."""
        self._memory, seconds = self._meter.stop()
        tokens, self._longest = step.max_tokens, step.longest
        if self._memory.has_retried:
            text = "the allocator had to free cached blocks; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            self._log(f"update step {number}: {text} lowers fragmentation")
        if self._tokens:  # the first update step had no optimizer state before
            # One microbatch needs no longer rows, and had no gradients beside its activations.
            cap = MOST_TOKENS if len(step.microbatches) > 1 else 0
            if self._num_stages > 1:
                positions = sum(m.counts.get("positions", 0) for m in step.microbatches)
                cap = positions // (2 * self._num_stages)
            self._budget.add(tokens, step.longest, self._memory, cap)
        if self._ranks.is_zero and self._untimed is not None:
            then, num_tokens, its_seconds = self._untimed
            is_latest = tokens == self._loader.max_tokens
            if why := self._budget.take_time(then, its_seconds() / num_tokens, is_latest):
                found = self._budget.proposal
                start_there = f"max_tokens_per_microbatch={found} starts there"
                text = f"rows of up to {found:,} tokens from now on ({why}); {start_there}"
                self._log(f"update step {number}: {text}")
        # Read one update step later, so that the device has work. The first one with a budget compiles.
        is_timed = tokens == self._tokens and not self._budget.is_settled
        num_tokens = max(step.totals["real_tokens"], 1)
        self._untimed = (tokens, num_tokens, seconds) if is_timed else None
        self._tokens = tokens

    def metrics(self) -> dict[str, float]:
        """Returns budget and peak of the last update step on this rank."""
        peak = 0 if self._memory is None else self._memory.peak
        return {"max_tokens_per_microbatch": self._tokens, "peak_memory_gib": peak / 2**30}
