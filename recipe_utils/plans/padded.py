"""Plans of padded microbatches: in the dataset's order, or sorted by length and cut for the least cost.

Example: samples of 5, 3, 9 and 2 tokens, where one more microbatch costs as much as 2 positions. In order, two
at a time, they are 2 x 5 + 2 x 9 = 28 positions in 2 microbatches: cost 32. Sorted, [9] [5] [3, 2] costs
9 + 5 + 6 + 3 x 2 = 26, less than [9, 5] [3, 2] (28) and [9] [5] [3] [2] (27). Two ranks need 2 rounds for 3
microbatches, so they compute 4: rank 0 [9] and [2], rank 1 [5] and [3].
"""

import operator
from collections.abc import Sequence

from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.plans.rounds import Microbatches, longest_first


def plan_in_order(lengths: Sequence[int], num_ranks: int = 1, *, batch_size: int) -> list[Microbatches]:
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
    cost: MicrobatchCost,
) -> list[Microbatches]:
    """Sorts the samples by length, cuts them into microbatches and deals these to ranks.

    On one rank no partition of the samples costs less. Several ranks compute as many rounds as the cheapest cut fills,
    of microbatches of about equal cost; in each, the costliest one goes to the rank with the least cost so far. The
    longest samples are first, so that an out-of-memory error occurs in the first microbatch.

    ``max_tokens_per_microbatch`` bounds rows * longest [positions]; None is ``batch_size`` times the longest of these
    samples. A longer sample gets its own microbatch. The result has the form of :func:`plan_in_order`'s; every rank
    gets the same number of microbatches, unless there are too few samples.
    """
    max_tokens = max_tokens_per_microbatch or batch_size * max(lengths, default=1)
    order = longest_first(lengths)
    descending = [lengths[position] for position in order]
    max_rows = [max(max_tokens // length, 1) for length in descending]
    cuts = _cheapest_cut(descending, max_rows, cost)
    # Ranks wait for one another in each round: what counts is the costliest microbatch, not their sum.
    if num_ranks > 1:
        row_costs = [cost.sample_cost(length) for length in descending]
        num_rounds = -(-len(cuts) // num_ranks)
        cuts = _even_cut(row_costs, max_rows, num_rounds * num_ranks)

    # In each round the rank that has computed least so far gets the costliest microbatch.
    def microbatch_cost(rows: tuple[int, int]) -> float:
        start, end = rows
        return cost(end - start, descending[start])

    ranks: list[Microbatches] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for first in range(0, len(cuts), num_ranks):
        costliest_first = sorted(cuts[first : first + num_ranks], key=microbatch_cost, reverse=True)
        least_loaded_first = sorted(range(num_ranks), key=loads.__getitem__)
        for rank, rows in zip(least_loaded_first, costliest_first, strict=False):
            ranks[rank].append(order[slice(*rows)])
            loads[rank] += microbatch_cost(rows)
    return ranks


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


def _even_cut(row_costs: Sequence[float], max_rows: Sequence[int], num_microbatches: int) -> Cuts:
    """Returns a cut into ``num_microbatches``, or one for each sample if there are fewer samples.

    Each microbatch takes as many samples as a limit on its cost allows, the lowest at which all fit.
    """
    num_samples = len(row_costs)

    def cut(limit: float) -> Cuts:
        cuts = []
        start = 0
        for num_to_come in reversed(range(min(num_microbatches, num_samples))):
            # The small term corrects quotients that rounding puts below an integer.
            num_rows = int(limit / row_costs[start] + 1e-9)
            # Leaves one sample for each later microbatch.
            num_rows = min(num_rows, max_rows[start], num_samples - start - num_to_come)
            cuts.append((start, start + max(num_rows, 1)))
            start = cuts[-1][1]
        return cuts

    # Halves the interval in which the lowest sufficient limit lies; ten times is exact to a thousandth.
    too_low, enough = 0.0, max(map(operator.mul, row_costs, max_rows), default=0.0)
    for _ in range(10):
        middle = (too_low + enough) / 2
        if sum(end - start for start, end in cut(middle)) == num_samples:
            enough = middle
        else:
            too_low = middle
    return cut(enough)
