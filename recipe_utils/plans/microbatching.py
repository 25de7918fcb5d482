"""Choice of a plan, with the limits of its microbatches.

``Microbatching("packed", max_tokens=10)`` plans samples of 5, 3, 9 and 2 tokens on one rank as the rows [5, 3, 2] and [9].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.plans.packed import plan_packed
from recipe_utils.plans.padded import plan_in_order, plan_least_padding
from recipe_utils.plans.rounds import Plan

PlanName = Literal["in_order", "least_padding", "packed"]

FIRST_TOKENS = 2048
"""First budget of a search. Small for any model that needs a GPU; the same on all ranks."""
MOST_TOKENS = 2**20
"""Largest budget of a search."""


@dataclass(frozen=True)
class Microbatching:
    """Plan of the samples of an update step, and limits of its microbatches."""

    plan: PlanName
    """``in_order``: ``batch_size`` samples at a time; ``least_padding``: sorted by length and cut for the least cost;
    ``packed``: concatenated to rows without padding."""
    batch_size: int = 1
    """Samples per microbatch with ``in_order``; else, without ``max_tokens``, so many of the longest bound a microbatch."""
    max_tokens: int | None = None
    """Positions per microbatch, not with ``in_order``: tokens of a packed row, or rows times the longest row."""
    max_ranks_per_row: int = 1
    """Ranks that compute a sample of more than ``max_tokens`` together, a power of two, with ``packed``."""
    balances_ranks: bool = True
    """Moves samples between data-parallel ranks to balance them, not with ``in_order``."""
    batch_size_val: int | None = None
    """Samples per microbatch of a validation with the same model; None for ``batch_size``."""
    is_searched: bool = False
    """``max_tokens`` is the first of several, which are found while training."""

    @property
    def plans_by_tokens(self) -> bool:
        """Returns True if the samples of an update step are regrouped by length."""
        return self.plan != "in_order"

    @property
    def is_packed(self) -> bool:
        """Returns True if samples are concatenated to rows."""
        return self.plan == "packed"

    @property
    def moves_samples(self) -> bool:
        """Returns True if samples move between data-parallel ranks."""
        return self.plans_by_tokens and self.balances_ranks

    def make_plan(
        self, max_tokens: int | None, cost: MicrobatchCost, num_rows: int = 1, fills_rows: bool = False
    ) -> Plan:
        """Returns the plan of ``max_tokens``, see :func:`recipe_utils.plans.padded.plan_least_padding`.

        ``cost`` is the device's. A sample with ``num_rows`` padded rows of one length counts as one row. Packed rows
        are filled one after the other with ``fills_rows``.
        """
        if not self.plans_by_tokens:
            return partial(plan_in_order, batch_size=self.batch_size)
        limits: Mapping[str, Any] = {
            "batch_size": self.batch_size,
            "max_tokens_per_microbatch": max_tokens and max(max_tokens // num_rows, 1),
            "cost": cost._replace(overhead=cost.overhead / num_rows),
        }
        if self.is_packed:
            return partial(plan_packed, max_ranks_per_row=self.max_ranks_per_row, fills_rows=fills_rows, **limits)
        return partial(plan_least_padding, **limits)
