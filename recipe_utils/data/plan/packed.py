"""Plan of packed rows, of which a long one is computed by several ranks together."""

import heapq
import operator
from collections.abc import Sequence
from typing import NamedTuple

from recipe_utils.data.plan.cost import MicrobatchCost
from recipe_utils.data.plan.plan import Microbatches, longest_first

_LOWER = 0.7
"""Factor between the costs per rank that plans are tried with."""
_DEFAULT_COST = MicrobatchCost()


class _Row(NamedTuple):
    cost: float
    """On each of its ranks."""
    num_ranks: int
    positions: list[int]


class _Plan(NamedTuple):
    ranks: list[Microbatches]
    total: float
    """Sum over rounds of the costliest row, overhead included."""


def plan_packed(
    lengths: Sequence[int],
    num_ranks: int = 1,
    *,
    batch_size: int = 1,
    max_tokens_per_microbatch: int | None = None,
    max_ranks_per_row: int = 1,
    cost: MicrobatchCost = _DEFAULT_COST,
) -> list[Microbatches]:
    """Packs whole samples without padding into few rows of about equal cost.

    A sample longer than a rank's bound begins a row of 2, 4, ... ranks, at least as many as hold it.
    Longest first, each other sample goes into the row with the least cost per rank so far (Graham
    1969, doi:10.1137/0117039) among those with space; if a sample fits in none, one more row per rank
    is opened.

    Arguments and the result are those of :func:`recipe_utils.data.plan.padded.plan_least_padding`;
    a microbatch is one row, ``max_tokens_per_microbatch`` bounds its tokens on each of its ranks,
    and ``max_ranks_per_row``, a power of two, the number of these. They are neighbors, and the
    first is a multiple of their number. A sample longer than the bound on the most ranks is computed
    on these.
    """
    max_tokens = max_tokens_per_microbatch or batch_size * max(lengths, default=1)
    sizes = [1]
    while 2 * sizes[-1] <= max_ranks_per_row and num_ranks % (2 * sizes[-1]) == 0:
        sizes.append(2 * sizes[-1])
    costs = [cost.of_sample(length) for length in lengths]

    def sizes_at(level: float) -> list[int]:
        """Returns the fewest ranks on which each sample fits and costs no more than ``level``."""
        return [
            next((n for n in sizes if length <= n * max_tokens and own <= n * level), sizes[-1])
            for length, own in zip(lengths, costs, strict=True)
        ]

    fewest = sizes_at(float("inf"))
    best = _plan(lengths, costs, fewest, sizes, num_ranks, max_tokens, cost.overhead)
    level = max(map(operator.truediv, costs, fewest), default=0.0)
    # A round lasts as long as its costliest row, so more ranks for that may shorten it.
    while max(fewest, default=1) > 1:
        level *= _LOWER
        more = sizes_at(level)
        found = _plan(lengths, costs, more, sizes, num_ranks, max_tokens, cost.overhead)
        if found.total >= best.total:
            break
        best = found
    return best.ranks


def _plan(
    lengths: Sequence[int],
    costs: Sequence[float],
    num_ranks_of: Sequence[int],
    sizes: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    overhead: float,
) -> _Plan:
    """Packs samples into rows, given the number of ranks of each; those of several begin a row each."""
    short: list[int] = []
    spanning: list[_Row] = []
    num_tokens = 0
    for position in longest_first(lengths):
        size = num_ranks_of[position]
        num_tokens += min(lengths[position], size * max_tokens)
        if size == 1:
            short.append(position)
        else:
            spanning.append(_Row(costs[position] / size, size, [position]))
    # Costliest first, so that the rows of a round cost about the same.
    spanning.sort(key=lambda row: (-row.cost, row.positions))
    round_of, num_free = _rounds_of(spanning, sizes, num_ranks)
    num_rounds = max(-(-num_tokens // (num_ranks * max_tokens)), len(num_free), 1)
    rows = None
    while rows is None:
        num_free += [num_ranks] * (num_rounds - len(num_free))
        rows = _fill_rows(lengths, costs, short, spanning, round_of, num_free, max_tokens)
        num_rounds += 1

    filled, single = rows[: len(spanning)], rows[len(spanning) :]
    single.sort(key=lambda row: (-row.cost, row.positions))
    rounds: list[list[_Row]] = [[] for _ in num_free]
    for row, at in zip(filled, round_of, strict=True):
        rounds[at].append(row)
    ranks: list[Microbatches] = [[] for _ in range(num_ranks)]
    total = 0.0
    loads = [0.0] * num_ranks
    for of_round, number in zip(rounds, num_free, strict=True):
        of_round += single[:number]
        single = single[number:]
        _deal(of_round, sizes, ranks, loads)
        total += max((row.cost for row in of_round), default=0.0) + overhead
    for microbatches in ranks:
        while microbatches and not microbatches[-1]:
            microbatches.pop()
    return _Plan(ranks, total)


def _rounds_of(
    rows: Sequence[_Row], sizes: Sequence[int], num_ranks: int
) -> tuple[list[int], list[int]]:
    """Returns the round of each row, and the ranks that each round has left."""
    round_of: list[int] = []
    num_free: list[int] = []
    first = dict.fromkeys(sizes, 0)  # no earlier round has so many ranks left
    for row in rows:
        at = first[row.num_ranks]
        while at < len(num_free) and num_free[at] < row.num_ranks:
            at += 1
        first[row.num_ranks] = at
        if at == len(num_free):
            num_free.append(num_ranks)
        round_of.append(at)
        num_free[at] -= row.num_ranks
    return round_of, num_free


def _fill_rows(
    lengths: Sequence[int],
    costs_of: Sequence[float],
    short: Sequence[int],
    spanning: Sequence[_Row],
    round_of: Sequence[int],
    num_free: Sequence[int],
    max_tokens: int,
) -> list[_Row] | None:
    """Returns the spanning rows, filled up, and those of one rank that are not empty.

    ``short`` are positions, longest first. A round with a spanning row lasts as long as that, so its
    other rows are filled up to that first. None if a sample fits in no row.
    """
    levels = [0.0] * len(num_free)
    for row, at in zip(spanning, round_of, strict=True):
        levels[at] = max(levels[at], row.cost)
    rounds = [*round_of, *(at for at, number in enumerate(num_free) for _ in range(number))]
    num_single = len(rounds) - len(spanning)
    sizes = [row.num_ranks for row in spanning] + [1] * num_single
    rows = [list(row.positions) for row in spanning] + [[] for _ in range(num_single)]
    space = [row.num_ranks * max_tokens - lengths[row.positions[0]] for row in spanning]
    space += [max_tokens] * num_single
    costs = [row.cost for row in spanning] + [0.0] * num_single

    def entry(row: int) -> tuple[float, int]:
        return costs[row] - levels[rounds[row]], row

    # Two heaps: rows that the last sample fitted in, the cheapest first, and the others, those with
    # most space first. A row is looked at again only once a sample is short enough for it.
    least_costly = [entry(row) for row in range(len(rows))]
    heapq.heapify(least_costly)
    too_full: list[tuple[int, int]] = []
    for position in short:
        length = lengths[position]
        while too_full and -too_full[0][0] >= length:
            heapq.heappush(least_costly, entry(heapq.heappop(too_full)[1]))
        while least_costly and rows[at := least_costly[0][1]] and space[at] < length:
            heapq.heappop(least_costly)
            heapq.heappush(too_full, (-space[at], at))
        if not least_costly:
            return None
        at = least_costly[0][1]
        costs[at] += costs_of[position] / sizes[at]
        heapq.heapreplace(least_costly, entry(at))
        rows[at].append(position)
        space[at] -= length
    return [_Row(*each) for each in zip(costs, sizes, rows, strict=True) if each[2]]


def _deal(
    rows: Sequence[_Row], sizes: Sequence[int], ranks: list[Microbatches], loads: list[float]
) -> None:
    """Adds a round to the ranks' microbatches: of each size the costliest row where the load is least."""
    is_taken = [False] * len(ranks)
    for size in reversed(sizes):  # largest first, so that all are aligned
        free = [first for first in range(0, len(ranks), size) if not is_taken[first]]
        free.sort(key=lambda first: sum(loads[first : first + size]))
        of_size = sorted((row for row in rows if row.num_ranks == size), key=lambda row: -row.cost)
        for first, row in zip(free, of_size, strict=False):
            for rank in range(first, first + size):
                is_taken[rank] = True
                ranks[rank].append(row.positions)
                loads[rank] += row.cost
    for rank, microbatches in enumerate(ranks):
        if not is_taken[rank]:
            microbatches.append([])
