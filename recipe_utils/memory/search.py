"""Search for the tokens of a microbatch, while training: each trial is an update step with the exact gradient."""

from collections.abc import Callable, Mapping
from typing import Any

from recipe_utils.memory.meter import METERS, Measured
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks

FIRST_TOKENS = 2048
"""First budget. Small for any model that needs a GPU; the same on all ranks."""
MOST_TOKENS = 2**20
"""Largest budget."""
_AFTER_RETRY = 0.85
"""Factor of a row for which the allocator had to free its cached blocks."""
_NOISE = 1.02
"""Factor of measured bytes, so that noise does not hide their growth."""
_NUM_DIGITS = 6
"""Binary digits of budgets: few, so that noise changes nothing."""


def rounded(tokens: float, num_digits: int = _NUM_DIGITS) -> int:
    """Returns the largest number of at most ``tokens`` with so many binary digits, at least 1."""
    shift = max(int(tokens).bit_length() - num_digits, 0)
    return max(int(tokens) >> shift << shift, 1)


class TokenBudget:
    """Largest budget that fits this rank.

    Rows of 2,000 and 4,000 tokens took 10 and 19.6 GiB, so with 2 % noise bytes grow by at most
    (20 - 10) / (4,000**2 - 2,000**2) per squared token. Where 32 GiB fit, the next rows have
    sqrt(4,000**2 + (32 - 19.6) * 1.2e6) = 5,560 tokens. This parabola bounds any growth between linear and
    quadratic, with any constant. The budget at most doubles the longest row *that ran*. A peak above the limit
    lowers it for the rest of the run.

    Args:
        first: first budget [tokens].
        num_digits: binary digits of proposals; 1 for doublings.
    """

    def __init__(self, first: int = FIRST_TOKENS, num_digits: int = _NUM_DIGITS) -> None:
        self.largest: float = first
        """Upper bound of all proposals so far."""
        self._num_digits = num_digits
        self._most = MOST_TOKENS  # after peaks above the limit
        self._shortest, self._longest = (MOST_TOKENS, 0), (0, 0)  # rows that ran, and bytes added

    @property
    def proposal(self) -> int:
        """Returns the budget that this rank proposes [tokens]."""
        return rounded(min(self.largest, self._most), self._num_digits)

    def add(self, longest: int, step: Measured, cap: int = MOST_TOKENS) -> None:
        """Adds an update step that ran.

        Args:
            longest: most positions of a microbatch.
            step: its memory.
            cap: bound of the growth [tokens]; 0 to ignore an update step that fits.
        """
        if longest < self.proposal // 4:  # dummy rows and rests are hardly the cause of a peak
            return
        if step.peak > step.limit or step.has_retried:
            fits = max(step.limit - step.before, 0) / max(step.peak - step.before, 1)
            factor = min(max(fits, 0.5), _AFTER_RETRY if step.has_retried else 1)
            self._most = min(self._most, max(int(longest * factor), 1))
        elif cap:
            self.largest = max(self.largest, min(self._largest_after(longest, step), cap))

    def _largest_after(self, longest: int, step: Measured) -> float:
        """Returns the longest row that fits, given those that ran."""
        added = max(step.peak - step.before, 1)
        self._shortest = min(self._shortest, (longest, added))
        # The longest row may take what a shorter one took.
        self._longest = max(self._longest[0], longest), max(self._longest[1], added)
        (longest, most), (shortest, least) = self._longest, self._shortest
        if shortest > 0.8 * longest:
            shortest, least = 0, 0
        growth = (_NOISE * most - least) / (longest**2 - shortest**2)
        room = max(step.limit - step.before - most, 0)
        return min(2 * longest, (longest**2 + room / growth) ** 0.5)


class BudgetSearch:
    """Budget of a training with ``max_tokens_per_microbatch: auto``: measures update steps, agrees, and logs.

    Args:
        loader: loader of the training, which plans with the least proposal of all ranks.
        ranks: ranks of the job.
        log: logs a line on rank 0.
    """

    def __init__(self, loader: Any, ranks: Ranks, log: Callable[[str], None]) -> None:
        self._loader, self._ranks, self._log = loader, ranks, log
        self._meter = METERS[ranks.device.type](ranks.device)
        # Kernels are compiled for each length.
        self._num_digits = 1 if loader.collator.has_few_lengths else _NUM_DIGITS
        # Two microbatches for each stage keep the bubble small.
        self._num_stages = loader.settings.pipeline_parallel_dim
        self._peak, self._logged = 0, loader.max_tokens
        self.budget = TokenBudget(loader.max_tokens, self._num_digits)
        loader.propose_tokens = lambda: self.budget.proposal

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continues with the budget of a checkpoint if it was found on the same hardware."""
        is_same = self._hardware.items() <= saved.items()
        if all(gather_objects(is_same, self._ranks.cpu_group)):
            self.budget = TokenBudget(saved["tokens"], self._num_digits)
            self._loader.bound_rows(saved["tokens"])
            self._logged = saved["tokens"]

    def state(self) -> dict[str, Any]:
        """Returns the budget for a checkpoint."""
        return {"tokens": self._loader.max_tokens, **self._hardware}

    @property
    def _hardware(self) -> dict[str, int]:
        return {"memory_bytes": self._meter.total_bytes, "world_size": self._ranks.world_size}

    def start(self) -> None:
        """Starts an update step."""
        self._meter.start()

    def stop(self, step: Any, number: int) -> None:
        """Measures an enqueued update step, and proposes a budget for those not yet planned."""
        memory, longest, tokens = self._meter.stop(), step.longest, self._loader.max_tokens
        self._peak = memory.peak
        if tokens != self._logged:
            took = f"{longest:,} took {memory.peak / 2**30:.2f} of {memory.limit / 2**30:.2f} GiB"
            self._log(f"update step {number}: next rows have up to {tokens:,} tokens ({took})")
            self._logged = tokens
        if memory.has_retried:
            text = "the allocator had to free cached blocks; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            self._log(f"update step {number}: {text} lowers fragmentation")
        if number == 1:  # without the optimizer's state
            return
        # One microbatch needs no longer rows, and had no gradients beside its activations.
        cap = MOST_TOKENS if len(step.microbatches) > 1 else 0
        if self._num_stages > 1:
            positions = sum(m.counts.get("positions", 0) for m in step.microbatches)
            cap = positions // (2 * self._num_stages)
        self.budget.add(longest, memory, cap)

    def metrics(self) -> dict[str, float]:
        """Returns the budget of the next rows and the peak of the last update step on this rank."""
        tokens, peak = self._loader.max_tokens, self._peak / 2**30
        return {"max_tokens_per_microbatch": tokens, "peak_memory_gib": peak}
