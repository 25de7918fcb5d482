"""Plans: how the samples of an update step become microbatches, on one rank or over all of them.

A plan is a pure, deterministic function of lengths and limits; it sees no tensor and no process
group. The loss is normalised over the whole update step, so no plan changes the gradient, only
what it costs to compute. Every rank computes the same plan for itself, so arithmetic here is
elementwise or in Python's order: no sum may depend on the machine.

A *round* is one microbatch on every rank: FSDP's ranks go through them in step. Both plans that
regroup samples sort them, longest first, and deal each round's costliest microbatch to the rank that
computes least so far.
"""

import heapq
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

Microbatches = list[list[int]]
"""Of one rank: for each microbatch the positions of its samples."""


class MicrobatchCost(NamedTuple):
    """What a microbatch costs, in slots (positions computed) of a short sample.

    A slot costs its share of the matrix products and, in attention, more the longer its row or document
    is. Per token these are 6 * N and 6 * L * d * s floating-point operations for forward and backward
    with a causal mask (N parameters, L layers, width d, length s; Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1), so the second equals the first at s = N / (L * d) where all operations
    are equally fast. Each microbatch costs something besides, whatever its size, so that tiny ones do
    not win by count. :mod:`recipe_utils.benchmark.microbatch_cost` fits both to measured times, on two CPU cores to
    within 4 % in the median.
    """

    overhead_slots: float = 75.0
    """Of one microbatch more. The fit is 100; the cheapest cut is flat around it (75 costs 0.2 % more), and
    less padding takes less memory."""
    equal_attention_length: float = float("inf")
    """Length at which attention takes as long as everything else [tokens]."""

    def __call__(self, num_rows: int, longest: int) -> float:
        """Cost of ``num_rows`` samples padded to ``longest`` tokens."""
        return num_rows * self.of_sample(longest) + self.overhead_slots

    def of_sample(self, length: int) -> float:
        """What a sample of ``length`` tokens, padding included, adds to its microbatch."""
        return length * (1 + length / self.equal_attention_length)


class DeviceCosts(NamedTuple):
    """What a plan must know of a kind of device."""

    overhead_slots: float
    """See :class:`MicrobatchCost`."""
    attention_slowness: float
    """Time of an operation in attention over that of one in a matrix product."""


MEASURED_COSTS = {"cpu": DeviceCosts(MicrobatchCost().overhead_slots, 3.6)}
"""By the kind of device, where :mod:`recipe_utils.benchmark.microbatch_cost` has run."""
ESTIMATED_COSTS = DeviceCosts(400.0, 2.0)
"""Of other devices, by arithmetic: launching a microbatch's kernels takes some 5 ms, in which a GPU would compute
300 to 500 slots of a model of a billion parameters; its attention runs at about half the speed of its products."""

_DEFAULT_COST = MicrobatchCost()


def plan_in_order(
    lengths: Sequence[int], num_ranks: int = 1, *, batch_size: int
) -> list[Microbatches]:
    """Groups the samples as they come, ``batch_size`` at a time, as the stock recipes do.

    Args:
        lengths: tokens of each sample in the update step, shape [n].
        num_ranks: the microbatches are dealt to them in turn.
        batch_size: samples per microbatch.

    Returns:
        For each rank its microbatches of positions in ``lengths``, each position exactly once. The
        last microbatch may be smaller; no samples give no microbatches.
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
    samples in every round, so that little is padded, and as many as bring its total level with the
    others'. Longest first, so that what runs out of memory does so in the first microbatch.

    Args:
        lengths: tokens of each sample in the update step, shape [n].
        num_ranks: ranks to cut for.
        batch_size: only used where ``max_tokens_per_microbatch`` is None.
        max_tokens_per_microbatch: bound on rows * longest [slots]; None for ``batch_size`` times the
            longest of these samples. A sample above it gets a microbatch of its own.
        cost: of a microbatch.

    Returns:
        For each rank its microbatches of positions in ``lengths``, each position exactly once; as
        many on every rank, unless the samples do not suffice.
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
    """Packs the samples, whole and without padding, into as few equally costly rows as hold them.

    Longest first, each into the row that costs least so far (Graham 1969, doi:10.1137/0117039)
    among those with room; with one more row per rank if some sample finds none.

    Args:
        lengths: tokens of each sample in the update step, shape [n].
        num_ranks: ranks to pack for.
        batch_size: only used where ``max_tokens_per_microbatch`` is None.
        max_tokens_per_microbatch: bound on the tokens of a row; None for ``batch_size`` times the
            longest of these samples. A sample above it gets a row of its own.
        cost: of a microbatch, which is one row.

    Returns:
        For each rank its microbatches of positions in ``lengths``, each position exactly once; as
        many on every rank, unless the samples do not suffice.
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


Plan = Callable[[Sequence[int], int], list[Microbatches]]
"""Lengths of samples [tokens], number of ranks -> for each rank its microbatches of positions."""

PLANS = {
    "in_order": plan_in_order,
    "least_padding": plan_least_padding,
    "packed": plan_packed,
}
"""Value of ``microbatching`` -> plan."""


def make_plan(
    microbatching: str, batch_size: int, max_tokens: int | None, cost: MicrobatchCost
) -> Plan:
    """The plan of a value of ``microbatching``, with all but lengths and ranks given; see the plans."""
    arguments: dict[str, Any] = {"batch_size": batch_size}
    if microbatching != "in_order":
        arguments |= {"max_tokens_per_microbatch": max_tokens, "cost": cost}
    return partial(PLANS[microbatching], **arguments)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))


def _fill_rows(
    lengths: Sequence[int],
    longest_first: Sequence[int],
    num_rows: int,
    max_tokens: int,
    cost: MicrobatchCost,
) -> list[tuple[float, list[int]]] | None:
    """Cost and positions of each row that is not empty; None if some sample has no room."""
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
    """The cut of least total cost, by a dynamic program; O(n * r) for microbatches of up to r rows.

    The cheapest cut of the first i samples is the cheapest cut of some first j, and one microbatch
    of the samples between. No partition of the samples costs less than the best cut, since exchanging
    samples of two microbatches until one holds the longer ones never raises the cost.
    """
    # least[i]: cost of the cheapest cut of the first i samples, whose last microbatch starts at
    # start_of_last[i].
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
"""Of a limit, to within 1/256 of the range between the mean that all need and what is enough."""


def _level_cuts(
    descending: Sequence[int], max_rows: Sequence[int], cost: MicrobatchCost, num_ranks: int
) -> list[Cuts]:
    """For each rank its cuts, one of each round, so that the ranks' totals differ little.

    In as few rounds as the bound allows, and in more as long as that lowers the costliest rank's
    total: more rounds pad less and are leveled better, and each costs its overhead.
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
    """For each rank its cuts, and what the costliest rank's cost together.

    Each microbatch takes as many of the sorted samples as a limit of cost allows, the lowest limit at
    which all samples fit; each falls short of it by up to a sample. So the last round, that of the
    shortest samples, is cut anew once the others are dealt: every rank takes what it lacks of a
    total, again the lowest.
    """
    num_samples = len(row_costs)

    def cut(start: int, limits: Sequence[float]) -> Cuts:
        """The samples from ``start`` on, in each microbatch as many as its limit allows."""
        cuts = []
        for num_to_come, limit in zip(range(len(limits) - 1, -1, -1), limits, strict=True):
            if start == num_samples:
                break
            # The small term makes up for a quotient that rounding puts below a whole number.
            num_rows = int(limit / row_costs[start] + 1e-9)
            # Leaves one sample for each microbatch to come, while there are any.
            num_rows = min(num_rows, max_rows[start], num_samples - start - num_to_come)
            cuts.append((start, start + max(num_rows, 1)))
            start = cuts[-1][1]
        return cuts

    def cut_lowest(start: int, loads: Sequence[float], most: float) -> Cuts:
        """The same up to the lowest total, loads included, that holds all; ``most`` above each does."""

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
