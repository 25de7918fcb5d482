"""Plans: assignments of an update step's samples to microbatches and ranks.

A plan is a pure function of lengths and limits. The loss is normalised over the whole update step,
so a plan changes the cost of the gradient and not the gradient. Every rank computes the plan of all
ranks, so arithmetic is elementwise or in Python's order: no sum may depend on the machine.

A *round* is one microbatch on every rank; FSDP's ranks run rounds in lockstep. Plans that regroup
samples sort them, longest first, and give each round's costliest microbatch to the rank with the
least cost so far.
"""

import heapq
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

Microbatches = list[list[int]]
"""Microbatches of one rank: for each of them the positions of its samples."""

Plan = Callable[[Sequence[int], int], list[Microbatches]]
"""Lengths of samples [tokens], number of ranks -> microbatches of each rank."""


class MicrobatchCost(NamedTuple):
    """Cost of a microbatch, in positions of a short sample.

    A position costs its share of the matrix products and, in attention, more the longer its row or
    document is. Per token these are 6 * N and 6 * L * d * s floating-point operations for forward
    and backward with a causal mask (N parameters, L layers, width d, length s; Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1), so the second equals the first at s = N / (L * d) if all
    operations are equally fast. Each microbatch has an overhead that does not depend on its size.
    :mod:`recipe_utils.benchmark.microbatch_cost` fits both to measured times, on two CPU cores to
    within 4 % in the median.
    """

    overhead_slots: float = 75.0
    """Cost of one more microbatch. The fit is 100; the cheapest cut is flat around it (75 costs
    0.2 % more), and less padding takes less memory."""
    equal_attention_length: float = float("inf")
    """Length at which attention takes as long as everything else [tokens]."""

    def __call__(self, num_rows: int, longest: int) -> float:
        """Returns the cost of ``num_rows`` samples padded to ``longest`` tokens."""
        return num_rows * self.of_sample(longest) + self.overhead_slots

    def of_sample(self, length: int) -> float:
        """Returns the part of a sample of ``length`` tokens, padding included, in its microbatch's cost."""
        return length * (1 + length / self.equal_attention_length)


class DeviceCosts(NamedTuple):
    """Costs of a device type."""

    overhead_slots: float
    attention_slowness: float
    """Time of an operation in attention over the time of one in a matrix product."""


MEASURED_COSTS = {"cpu": DeviceCosts(MicrobatchCost().overhead_slots, 3.6)}
"""Costs by device type that :mod:`recipe_utils.benchmark.microbatch_cost` measured."""
ESTIMATED_COSTS = DeviceCosts(400.0, 2.0)
"""Estimate for other devices: launching a microbatch's kernels takes some 5 ms, in which a GPU
would compute 300 to 500 positions of a model of a billion parameters; its attention runs at about
half the speed of its matrix products."""

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

    On one rank no partition of the samples costs less. Over several ranks, each takes neighbouring
    samples in every round, which limits padding, and as many as balance the totals. The longest
    samples are first, so that a lack of memory shows in the first microbatch.

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
    longest_first = _longest_first(lengths)
    descending = [lengths[position] for position in longest_first]
    max_rows = [max(max_tokens // length, 1) for length in descending]
    if num_ranks == 1:
        cuts_of_ranks = [_cheapest_cut(descending, max_rows, cost)]
    else:
        cuts_of_ranks = _level_cuts(descending, max_rows, cost, num_ranks)
    return [[longest_first[start:end] for start, end in cuts] for cuts in cuts_of_ranks]


def plan_packed(
    lengths: Sequence[int],
    num_ranks: int = 1,
    *,
    batch_size: int = 1,
    max_tokens_per_microbatch: int | None = None,
    cost: MicrobatchCost = _DEFAULT_COST,
) -> list[Microbatches]:
    """Packs whole samples without padding into few rows of about equal cost.

    Longest first, each sample goes into the row with the least cost so far (Graham 1969,
    doi:10.1137/0117039) among those with space; if a sample fits in none, one more row per rank is
    opened.

    Arguments and the result are those of :func:`plan_least_padding`; a microbatch is one row, and
    ``max_tokens_per_microbatch`` bounds its tokens.
    """
    max_tokens = max_tokens_per_microbatch or batch_size * max(lengths, default=1)
    longest_first = _longest_first(lengths)
    num_tokens = sum(min(length, max_tokens) for length in lengths)
    num_rounds = max(-(-num_tokens // (num_ranks * max_tokens)), 1)
    rows = None
    while rows is None:
        rows = _fill_rows(lengths, longest_first, num_rounds * num_ranks, max_tokens, cost)
        num_rounds += 1
    rows.sort(key=lambda row: (-row[0], row[1]))

    ranks: list[Microbatches] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for first in range(0, len(rows), num_ranks):
        of_round = rows[first : first + num_ranks]
        for rank, (row_cost, row) in zip(_least_loaded(loads), of_round, strict=False):
            ranks[rank].append(row)
            loads[rank] += row_cost
    return ranks


PLANS = {
    "in_order": plan_in_order,
    "least_padding": plan_least_padding,
    "packed": plan_packed,
}
"""Value of ``microbatching`` -> plan."""


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))


def _fill_rows(
    lengths: Sequence[int],
    longest_first: Sequence[int],
    num_rows: int,
    max_tokens: int,
    cost: MicrobatchCost,
) -> list[tuple[float, list[int]]] | None:
    """Returns cost and positions of each row that is not empty; None if a sample fits in no row."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    num_tokens = [0] * num_rows
    least_costly = [(0.0, row) for row in range(num_rows)]  # a heap
    for position in longest_first:
        length = lengths[position]
        too_full = []
        while (
            least_costly
            and (in_row := num_tokens[least_costly[0][1]])
            and in_row + length > max_tokens
        ):
            too_full.append(heapq.heappop(least_costly))
        if not least_costly:
            return None
        row_cost, row = least_costly[0]
        heapq.heapreplace(least_costly, (row_cost + cost.of_sample(length), row))
        rows[row].append(position)
        num_tokens[row] += length
        for entry in too_full:
            heapq.heappush(least_costly, entry)
    return [(row_cost, rows[row]) for row_cost, row in least_costly if rows[row]]


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
            row_costs, max_rows, cost.overhead_slots, num_ranks, num_rounds
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
        ranks = _least_loaded(loads)
        of_round = sorted(cuts[first : first + num_ranks], key=rows_cost, reverse=True)
        if first + num_ranks >= len(cuts):
            held = [loads[rank] for rank in ranks]
            of_round = cut_lowest(cuts[first][0], held, rows_cost(of_round[0]))
        for rank, rows in zip(ranks, of_round, strict=False):
            cuts_of_ranks[rank].append(rows)
            loads[rank] += rows_cost(rows) + overhead
    return cuts_of_ranks, max(loads)


def _least_loaded(loads: Sequence[float]) -> list[int]:
    return sorted(range(len(loads)), key=loads.__getitem__)
