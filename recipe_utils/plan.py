"""Plans: how the samples of an update step are grouped into microbatches.

A plan is a pure, deterministic function of lengths and limits; it sees no tensor and no process
group. The loss is normalised over the whole update step, so no plan changes the gradient, only
what it costs to compute.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class MicrobatchCost(NamedTuple):
    """What a padded microbatch costs, in slots (positions computed) of a short sample.

    A slot costs its share of the matrix products and, in attention, more the longer its row is. Per
    token these are 6 * N and 6 * L * d * s floating-point operations for forward and backward with
    a causal mask (N parameters, L layers, width d, row length s; Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1), so the second equals the first at s = N / (L * d). Each
    microbatch costs something besides, whatever its size, so that tiny ones do not win by count.
    """

    overhead_slots: float = 64.0
    """Of one microbatch more."""
    equal_attention_length: float = float("inf")
    """Row length at which attention costs as much as everything else [tokens]: N / (L * d)."""

    def __call__(self, num_rows: int, longest: int) -> float:
        """Cost of ``num_rows`` samples padded to ``longest`` tokens."""
        attention = 1 + longest / self.equal_attention_length
        return num_rows * longest * attention + self.overhead_slots


_DEFAULT_COST = MicrobatchCost()


def plan_in_order(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Groups the samples as they come, ``batch_size`` at a time, as the stock recipes do.

    Args:
        lengths: tokens of each sample of this rank in the update step, shape [n].
        batch_size: samples per microbatch.

    Returns:
        Microbatches of positions in ``lengths``, each position exactly once; the last microbatch may
        be smaller. No samples give no microbatches.
    """
    positions = list(range(len(lengths)))
    return [positions[start : start + batch_size] for start in range(0, len(positions), batch_size)]


def plan_least_padding(
    lengths: Sequence[int],
    batch_size: int,
    max_tokens_per_microbatch: int | None = None,
    cost: MicrobatchCost = _DEFAULT_COST,
) -> list[list[int]]:
    """Sorts the samples by length and cuts them into microbatches for the least total cost.

    A dynamic program over the sorted samples: the cheapest cut of the first i samples is the cheapest
    cut of some first j, and one microbatch of the samples between. No partition of the samples
    costs less, since exchanging samples of two microbatches until one holds the longer ones never
    raises the cost. Longest first, so that what runs out of memory does so in the first microbatch.

    Args:
        lengths: tokens of each sample of this rank in the update step, shape [n].
        batch_size: only used where ``max_tokens_per_microbatch`` is None.
        max_tokens_per_microbatch: bound on rows * longest [slots]; None for ``batch_size`` times the
            longest of these samples. A sample above it gets a microbatch of its own.
        cost: of a microbatch.

    Returns:
        Microbatches of positions in ``lengths``, each position exactly once. O(n * r) for microbatches
        of up to r rows.
    """
    longest_first = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    limit = max_tokens_per_microbatch
    if limit is None:
        limit = batch_size * max(lengths, default=0)

    # least[i]: cost of the cheapest cut of the first i samples, whose last microbatch starts at
    # start_of_last[i].
    least = [0.0] + [float("inf")] * len(lengths)
    start_of_last = [0] * (len(lengths) + 1)
    for start, position in enumerate(longest_first):
        longest = lengths[position]
        max_rows = max(limit // longest, 1)
        for end in range(start + 1, min(start + max_rows, len(lengths)) + 1):
            total = least[start] + cost(end - start, longest)
            if total < least[end]:
                least[end], start_of_last[end] = total, start
    microbatches = []
    end = len(lengths)
    while end > 0:
        microbatches.append(longest_first[start_of_last[end] : end])
        end = start_of_last[end]
    return microbatches[::-1]


def deal_evenly(
    lengths: Sequence[int], num_ranks: int, cost: MicrobatchCost = _DEFAULT_COST
) -> list[list[int]]:
    """Deals the samples of a whole update step to the ranks, so that each computes about as much.

    Longest first, each to the rank with the least so far (Graham 1969, doi:10.1137/0117039). The
    cost of a sample is that of its row without padding.

    Args:
        lengths: tokens of each sample of the update step, shape [n].
        num_ranks: data-parallel ranks.
        cost: of a microbatch; its overhead does not enter.

    Returns:
        Positions in ``lengths`` for each rank, ascending; each position exactly once. O(n log n).
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    least_loaded = [(0.0, rank) for rank in range(num_ranks)]  # a heap
    for position in sorted(
        range(len(lengths)), key=lambda position: (-lengths[position], position)
    ):
        load, rank = least_loaded[0]
        row_cost = cost(1, lengths[position]) - cost.overhead_slots
        heapq.heapreplace(least_loaded, (load + row_cost, rank))
        ranks[rank].append(position)
    return [sorted(positions) for positions in ranks]


PLANS = {"in_order": plan_in_order, "least_padding": plan_least_padding}
"""Value of ``microbatching`` -> plan, called with ``lengths`` and ``batch_size``."""
