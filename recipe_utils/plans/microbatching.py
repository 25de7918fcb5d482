"""Choice of a plan by config keys.

With ``MicrobatchSettings("packed", max_tokens_per_microbatch=10)``, samples of 5, 3, 9 and 2 tokens become the rows
[5, 3, 2] and [9] of one rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.plans.packed import plan_packed
from recipe_utils.plans.padded import plan_in_order, plan_least_padding
from recipe_utils.plans.rounds import Microbatches, Plan

PlanName = Literal["in_order", "least_padding", "packed"]

FIRST_TOKENS = 2048
"""First budget of a search. Small for any model that needs a GPU; the same on all ranks."""
MOST_TOKENS = 2**20
"""Largest budget of a search."""


@dataclass(frozen=True)
class MicrobatchSettings:
    """Config keys that a plan reads. :class:`recipe_utils.update_steps.settings.DataSettings` checks their values."""

    microbatching: PlanName = "in_order"
    """``in_order``: ``batch_size`` samples at a time; ``least_padding``: sorted by length and cut for the least cost;
    ``packed``: concatenated to rows without padding."""
    batch_size: int = 1
    """Samples per microbatch with ``in_order``; else, without ``max_tokens_per_microbatch``, so many of the longest
    bound a microbatch."""
    batch_size_val: int | None = None
    """Samples per microbatch in validation. Default: ``batch_size``."""
    max_tokens_per_microbatch: int | Literal["auto"] | None = None
    """Maximum positions per microbatch, not with ``in_order``: tokens of a packed row, or rows times the longest row.
    ``auto``: found while training, from :data:`FIRST_TOKENS` on."""
    max_ranks_per_row: int = 1
    """Maximum ranks, a power of two, that compute a longer sample together, with ``packed``."""
    balance_over_ranks: bool | None = None
    """Moves samples between data-parallel ranks to balance them. Default: True unless ``in_order``."""

    @property
    def plans_by_tokens(self) -> bool:
        """Returns True if the samples of an update step are regrouped by length."""
        return self.microbatching != "in_order"

    @property
    def is_packed(self) -> bool:
        """Returns True if samples are concatenated to rows."""
        return self.microbatching == "packed"

    @property
    def is_searched(self) -> bool:
        """Returns True if the positions of a microbatch are found while training."""
        return self.max_tokens_per_microbatch == "auto"

    @property
    def moves_samples(self) -> bool:
        """Returns True if samples move between data-parallel ranks."""
        return self.plans_by_tokens and self.balance_over_ranks is not False

    def make_plan(
        self, max_tokens: int | None, cost: MicrobatchCost, num_rows: int = 1, fills_rows: bool = False
    ) -> Plan:
        """Returns the plan of microbatches of ``max_tokens`` positions; for None see :func:`.plan_least_padding`.

        ``cost`` is the device's. A sample of ``num_rows`` padded rows of one length counts as one row. Packed rows are
        filled one after the other with ``fills_rows``.
        """
        if not self.plans_by_tokens:
            return partial(plan_in_order, batch_size=self.batch_size)
        plan: Callable[..., list[Microbatches]] = plan_least_padding
        if self.is_packed:
            plan = partial(plan_packed, max_ranks_per_row=self.max_ranks_per_row, fills_rows=fills_rows)
        return partial(
            plan,
            batch_size=self.batch_size,
            max_tokens_per_microbatch=max_tokens and max(max_tokens // num_rows, 1),
            cost=cost._replace(overhead=cost.overhead / num_rows),
        )
