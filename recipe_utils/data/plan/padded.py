"""Plans of padded microbatches: in the dataset's order, or sorted by length and cut for the least cost."""

import operator
from collections.abc import Sequence

from recipe_utils.data.plan.cost import MicrobatchCost
from recipe_utils.data.plan.plan import Microbatches, least_loaded, longest_first

_DEFAULT_COST = MicrobatchCost()


def plan_in_order(
    lengths: Sequence[int], num_ranks: int = 1, *, batch_size: int
) -> list[Microbatches]:
    """Groups samples in order, ``batch_size`` at a time, as the stock recipes do; ranks take turns.

    Returns the microbatches of each rank, which contain each position in ``lengths`` exactly once.
    The last microbatch may be smaller.
    """
    positions = list(range(len(lengths)))
    starts = range(0, len(positions), batch_size)
    microbatches = [positions[start : start + batch_size] for start in starts]
    return [microbatches[rank::num_ranks] for rank in range(num_ranks)]


def plan_least_padding(
    lengths: Sequence[int],
    num_ranks: int = 1,
    *,
    batch_size: int = 1,
    max_tokens_per_microbatch: int | None = None,
    cost: MicrobatchCost = _DEFAULT_COST,
) -> list[Microbatches]:
    """Sorts the samples by length and cuts them into microbatches for the least cost.

    On one rank no partition of the samples costs less. Over several ranks, each takes neighboring
    samples in every round, which limits padding, and as many as balance the totals. The longest
    samples are first, so that an out-of-memory error occurs in the first microbatch.

    The result has the form of :func:`plan_in_order`'s; every rank gets the same number of
    microbatches, unless there are too few samples.

    Args:
        lengths: tokens of each sample in the update step, [n].
        num_ranks: number of ranks.
        batch_size: only used if ``max_tokens_per_microbatch`` is None.
        max_tokens_per_microbatch: maximum rows * longest [positions]; None for ``batch_size`` times
            the longest of these samples. A longer sample gets its own microbatch.
        cost: cost of a microbatch.
    """
    if not lengths:
        return [[] for _ in range(num_ranks)]
    max_tokens = max_tokens_per_microbatch or batch_size * max(lengths)
    order = longest_first(lengths)
    descending = [lengths[position] for position in order]
    max_rows = [max(max_tokens // length, 1) for length in descending]
    if num_ranks == 1:
        cuts_of_ranks = [_cheapest_cut(descending, max_rows, cost)]
    else:
        cuts_of_ranks = _level_cuts(descending, max_rows, cost, num_ranks)
    return [[order[start:end] for start, end in cuts] for cuts in cuts_of_ranks]


# ---- Cuts of lengths in descending order, as (start, end) of each microbatch -----------------------

Cuts = list[tuple[int, int]]


def _cheapest_cut(descending: Sequence[int], max_rows: Sequence[int], cost: MicrobatchCost) -> Cuts:
    """Returns the cut of least total cost, by a dynamic program; O(n * r) for microbatches of up to r rows.

    The cheapest cut of the first i samples is the cheapest cut of some first j, and one microbatch
    of the samples between. No partition of the samples costs less than the best cut, since
    exchanging samples of two microbatches until one has the longer ones never raises the cost.
    """
    # least[i]: cost of the cheapest cut of the first i samples; its last microbatch starts at start_of_last[i].
    least = [0.0] + [float("inf")] * len(descending)
    start_of_last = [0] * (len(descending) + 1)
    for start, longest in enumerate(descending):
        for end in range(start + 1, min(start + max_rows[start], len(descending)) + 1):
            total = least[start] + cost(end - start, longest)
            if total < least[end]:
                least[end], start_of_last[end] = total, start
    cuts = []
    end = len(descending)
    while end > 0:
        cuts.append((start_of_last[end], end))
        end = start_of_last[end]
    return cuts[::-1]


_NUM_BISECTIONS = 8
"""Bisections of a limit, to within 1/256 of the range between the mean cost and an upper bound."""


def _level_cuts(
    descending: Sequence[int], max_rows: Sequence[int], cost: MicrobatchCost, num_ranks: int
) -> list[Cuts]:
    """Returns the cuts of each rank, one per round, so that the ranks' totals differ little.

    Rounds are as few as the bound allows, and more while that lowers the costliest rank's total:
    more rounds pad less and balance better, and each costs its overhead.
    """
    fewest_microbatches = start = 0
    while start < len(descending):
        start += max_rows[start]
        fewest_microbatches += 1
    num_rounds = -(-fewest_microbatches // num_ranks)

    row_costs = [cost.of_sample(length) for length in descending]
    best: list[Cuts] = []
    lowest = float("inf")
    while True:
        cuts_of_ranks, highest = _cut_rounds(
            row_costs, max_rows, cost.overhead, num_ranks, num_rounds
        )
        if highest >= lowest:
            return best
        best, lowest = cuts_of_ranks, highest
        num_rounds += 1


def _cut_rounds(
    row_costs: Sequence[float],
    max_rows: Sequence[int],
    overhead: float,
    num_ranks: int,
    num_rounds: int,
) -> tuple[list[Cuts], float]:
    """Returns the cuts of each rank, and the total cost of the costliest rank.

    Each microbatch takes as many of the sorted samples as a limit on its cost allows, the lowest at
    which all samples fit, and is below it by up to one sample. So the last round, with the shortest
    samples, is cut again after the others are assigned: every rank fills up to a total, again the
    lowest.
    """
    num_samples = len(row_costs)

    def cut(start: int, limits: Sequence[float]) -> Cuts:
        """Cuts the samples from ``start`` on; each microbatch takes as many as its limit allows."""
        cuts = []
        for num_to_come, limit in zip(range(len(limits) - 1, -1, -1), limits, strict=True):
            if start == num_samples:
                break
            # The small term corrects quotients that rounding puts below an integer.
            num_rows = int(limit / row_costs[start] + 1e-9)
            # Leaves one sample for each later microbatch, as long as there are any.
            num_rows = min(num_rows, max_rows[start], num_samples - start - num_to_come)
            cuts.append((start, start + max(num_rows, 1)))
            start = cuts[-1][1]
        return cuts

    def cut_lowest(start: int, loads: Sequence[float], most: float) -> Cuts:
        """Cuts at the lowest total with loads at which all samples fit; ``most`` above each load suffices."""

        def cut_to(total: float) -> Cuts:
            return cut(start, [total - load for load in loads])

        too_low = (sum(loads) + sum(row_costs[start:])) / len(loads)
        enough = max(loads) + most
        for _ in range(_NUM_BISECTIONS):
            middle = (too_low + enough) / 2
            if cut_to(middle)[-1][1] == num_samples:
                enough = middle
            else:
                too_low = middle
        return cut_to(enough)

    def rows_cost(rows: tuple[int, int]) -> float:
        return (rows[1] - rows[0]) * row_costs[rows[0]]

    as_the_bound = max(map(operator.mul, row_costs, max_rows))
    cuts = cut_lowest(0, [0.0] * (num_ranks * num_rounds), as_the_bound)
    cuts_of_ranks: list[Cuts] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for first in range(0, len(cuts), num_ranks):
        ranks = least_loaded(loads)
        of_round = sorted(cuts[first : first + num_ranks], key=rows_cost, reverse=True)
        if first + num_ranks >= len(cuts):
            held = [loads[rank] for rank in ranks]
            of_round = cut_lowest(cuts[first][0], held, rows_cost(of_round[0]))
        for rank, rows in zip(ranks, of_round, strict=False):
            cuts_of_ranks[rank].append(rows)
            loads[rank] += rows_cost(rows) + overhead
    return cuts_of_ranks, max(loads)
