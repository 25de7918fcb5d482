"""The plan and the collate function that belong together, for each value of ``microbatching``."""

import math
from functools import partial
from typing import Any

from recipe_utils.data.balance import Plan
from recipe_utils.data.collate import (
    Collate,
    CollateFn,
    collate_microbatch,
    collate_packed_microbatch,
)
from recipe_utils.data.plan import PLANS, MicrobatchCost


def plan_and_collate(
    microbatching: str,
    *,
    batch_size: int,
    max_tokens: int | None,
    cost: MicrobatchCost,
    collate_fn: CollateFn,
    ignore_index: int,
    padding_idx: int,
    merge_packed_rows: bool,
    num_row_lengths: int | None,
) -> tuple[Plan, Collate]:
    """How samples of an update step become microbatches, and those of a microbatch tensors.

    Args:
        microbatching: key of :data:`recipe_utils.data.plan.PLANS`.
        batch_size: samples per microbatch, with ``in_order``.
        max_tokens: bound on the slots of a microbatch otherwise; see the plans.
        cost: of a microbatch.
        collate_fn: pads the samples of a microbatch; not used for packed rows.
        ignore_index: the label of positions that are no targets.
        padding_idx: the token that packed rows are padded with.
        merge_packed_rows: see :func:`recipe_utils.data.collate.collate_microbatch`.
        num_row_lengths: packed rows of up to ``max_tokens`` are padded to one of so many lengths; None
            for no padding.
    """
    limits: dict[str, Any] = {"batch_size": batch_size}
    if microbatching != "in_order":
        limits |= {"max_tokens_per_microbatch": max_tokens, "cost": cost}
    plan: Plan = partial(PLANS[microbatching], **limits)
    if microbatching == "packed":
        row_multiple = None
        if num_row_lengths is not None and max_tokens is not None:
            row_multiple = math.ceil(max_tokens / num_row_lengths)
        return plan, partial(
            collate_packed_microbatch,
            ignore_index=ignore_index,
            padding_idx=padding_idx,
            row_multiple=row_multiple,
        )
    return plan, partial(
        collate_microbatch,
        collate_fn=collate_fn,
        ignore_index=ignore_index,
        merge_packed_rows=merge_packed_rows,
    )
