"""Plans: how the samples of an update step become microbatches, on one rank or over all of them.

A plan is a pure, deterministic function of lengths and limits; it sees no tensor and no process
group. The loss is normalised over the whole update step, so no plan changes the gradient, only
what it costs to compute. Every rank computes the same plan for itself, so arithmetic here is
elementwise or in Python's order: no sum may depend on the machine.

A *round* is one microbatch on every rank: FSDP's ranks go through them in step.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


ATTENTION_SLOWNESS = 3.6
"""Time of an operation in attention over that of one in a matrix product, measured on a CPU."""

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

    On one rank no partition of the samples costs less. Over several ranks, the cut is that of the
    cheapest rounds, after which the last round is cut once more, so that every rank ends with the same
    total. Longest first, so that what runs out of memory does so in the first microbatch.

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
        cuts_of_ranks = _cheapest_rounds(descending, max_rows, cost, num_ranks)
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


_MAX_TABLE_ENTRIES = 2**18
"""Bounds the planning of an update step to some 40 milliseconds, at the price of fewer limits tried."""


def _cheapest_rounds(
    descending: Sequence[int], max_rows: Sequence[int], cost: MicrobatchCost, num_ranks: int
) -> list[Cuts]:
    """For each rank the cuts that it computes, one of each round.

    A round costs what its costliest microbatch costs. Given that limit and where the round starts,
    each of its microbatches takes as many samples as it may, and so the round's end follows; a
    dynamic program over the starts chooses the limits. Within a round the ranks' costs differ by up
    to one sample, so the last round, that of the shortest samples, gives each rank what it lacks.
    """
    row_costs = [cost.of_sample(length) for length in descending]
    limits = _limits_to_try(row_costs, max_rows, num_ranks)
    next_start = _next_start(np.array(row_costs), np.array(max_rows), limits)
    round_end = _repeated(next_start, num_ranks)

    # least[m][i]: cost of the cheapest m rounds that hold the samples from i on; chosen[m][i]: the
    # limit of the first of them.
    num_samples = len(descending)
    least = [np.append(np.full(num_samples, np.inf), 0.0)]
    chosen = [np.empty(0, np.intp)]
    too_low = limits[:, None] < np.append(row_costs, 0.0)
    cheapest = np.inf
    while cheapest == np.inf or least[-1][0] < cheapest:
        cheapest = min(cheapest, least[-1][0])
        totals = limits[:, None] + cost.overhead_slots + least[-1][round_end]
        totals[too_low] = np.inf
        totals[:, num_samples] = np.inf
        chosen.append(totals.argmin(axis=0))
        least.append(totals.min(axis=0))

    best: list[Cuts] = []
    best_load = float("inf")
    for num_rounds in (len(least) - 2, len(least) - 1):
        if least[num_rounds][0] == np.inf:
            continue
        cuts_of_ranks: list[Cuts] = [[] for _ in range(num_ranks)]
        loads = [0.0] * num_ranks
        start = 0
        for num_left in range(num_rounds, 1, -1):
            ends = next_start[chosen[num_left][start]]
            cuts = []
            for _ in range(num_ranks):
                cuts.append((start, int(ends[start])))
                start = cuts[-1][1]
            # The costliest microbatch to the rank with the least so far.
            cuts.sort(key=lambda cut: (-(cut[1] - cut[0]) * row_costs[cut[0]], cut))
            for rank, (first, end) in zip(_least_loaded(loads), cuts, strict=True):
                cuts_of_ranks[rank].append((first, end))
                loads[rank] += (end - first) * row_costs[first] + cost.overhead_slots
        limit = float(limits[chosen[1][start]])
        _level_last_round(start, row_costs, max_rows, limit, cuts_of_ranks, loads)
        if max(loads) < best_load:
            best, best_load = cuts_of_ranks, max(loads)
    return best


def _limits_to_try(
    row_costs: Sequence[float], max_rows: Sequence[int], num_ranks: int
) -> NDArray[np.float64]:
    """Costs that a microbatch of some number of rows has, overhead excluded, ascending."""
    most_rows = dict(zip(row_costs, max_rows, strict=True))
    largest = max(row_cost * most for row_cost, most in most_rows.items())
    share = sum(row_costs) / num_ranks  # above it a round would leave ranks idle
    limits = sorted(
        {
            num_rows * row_cost
            for row_cost, most in most_rows.items()
            for num_rows in range(1, min(most, int(1.2 * share / row_cost) + 1) + 1)
        }
        | {largest}  # so that the budget, too, can be used up
    )
    most_limits = max(_MAX_TABLE_ENTRIES // len(row_costs), 24)
    if len(limits) > most_limits:
        useful = [limit for limit in limits if share / 8 <= limit <= 1.2 * share]
        step = max(len(useful) / most_limits, 1)
        limits = [useful[int(i * step)] for i in range(min(most_limits, len(useful)))]
        limits += [largest] if largest not in limits else []
    return np.array(limits)


def _next_start(
    row_costs: NDArray[np.float64], max_rows: NDArray[np.intp], limits: NDArray[np.float64]
) -> NDArray[np.intp]:
    """[limit, start]: where the microbatch after the one from ``start`` on starts."""
    num_samples = len(row_costs)
    # The small term makes up for a quotient that rounding puts below a whole number.
    num_rows = np.floor(limits[:, None] / row_costs + 1e-9).astype(np.intp)
    starts = np.minimum(np.arange(num_samples) + np.minimum(num_rows, max_rows), num_samples)
    return np.pad(starts, ((0, 0), (0, 1)), constant_values=num_samples)


def _repeated(step: NDArray[np.intp], times: int) -> NDArray[np.intp]:
    """[limit, start]: where ``times`` applications of ``step`` lead, by repeated squaring."""
    result = np.broadcast_to(np.arange(step.shape[1]), step.shape)
    while True:
        if times & 1:
            result = np.take_along_axis(step, result, axis=1)
        times >>= 1
        if not times:
            return result
        step = np.take_along_axis(step, step, axis=1)


def _least_loaded(loads: Sequence[float]) -> list[int]:
    return sorted(range(len(loads)), key=loads.__getitem__)


def _level_last_round(
    start: int,
    row_costs: Sequence[float],
    max_rows: Sequence[int],
    limit: float,
    cuts_of_ranks: list[Cuts],
    loads: list[float],
) -> None:
    """Cuts the samples from ``start`` on so that all ranks end at about the same load.

    Bisects the load to end at: each rank takes what it lacks of it, at least one sample while there
    is one for everybody. With ``limit`` for every rank the samples are known to fit.
    """
    num_samples, num_ranks = len(row_costs), len(loads)
    ranks = _least_loaded(loads)

    def cut(goal: float) -> Cuts:
        cuts = []
        first = start
        for num_after, rank in zip(range(num_ranks - 1, -1, -1), ranks, strict=True):
            if first == num_samples:
                break
            num_rows = int((goal - loads[rank]) / row_costs[first] + 1e-9)
            num_rows = min(num_rows, max_rows[first], num_samples - first - num_after)
            cuts.append((first, first + max(num_rows, 1)))
            first = cuts[-1][1]
        return cuts

    enough = max(loads) + limit
    too_little = min(loads)
    best = cut(enough)
    for _ in range(12):
        goal = (too_little + enough) / 2
        cuts = cut(goal)
        if cuts[-1][1] == num_samples:
            enough, best = goal, cuts
        else:
            too_little = goal
    for rank, (first, end) in zip(ranks, best, strict=False):
        cuts_of_ranks[rank].append((first, end))
        loads[rank] += (end - first) * row_costs[first]
