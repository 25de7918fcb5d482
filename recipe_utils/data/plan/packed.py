"""Plan of packed rows, of which a long one is computed by several ranks together."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from recipe_utils.data.plan.cost import MicrobatchCost
from recipe_utils.data.plan.plan import Microbatches, longest_first

_DEFAULT_COST = MicrobatchCost()


class _Row(NamedTuple):
    cost: float
    """On each of its ranks."""
    num_ranks: int
    positions: list[int]


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

    A sample longer than a rank's bound begins a row of 2, 4, ... ranks, as few as hold it. Longest
    first, each other sample goes into the row with the least cost per rank so far (Graham 1969,
    doi:10.1137/0117039) among those with space; if a sample fits in none, one more row per rank is
    opened.

    Arguments and the result are those of :func:`recipe_utils.data.plan.padded.plan_least_padding`;
    a microbatch is one row, ``max_tokens_per_microbatch`` bounds its tokens on each of its ranks,
    and ``max_ranks_per_row``, a power of two, the number of these. They are neighbours, and the
    first is a multiple of their number. A sample longer than the bound on the most ranks is computed
    on these.
    """
    max_tokens = max_tokens_per_microbatch or batch_size * max(lengths, default=1)
    sizes = [1]
    while 2 * sizes[-1] <= max_ranks_per_row and num_ranks % (2 * sizes[-1]) == 0:
        sizes.append(2 * sizes[-1])

    short, spanning, num_tokens = [], [], 0
    for position in longest_first(lengths):
        length = lengths[position]
        size = next((each for each in sizes if length <= each * max_tokens), sizes[-1])
        num_tokens += min(length, size * max_tokens)
        if size == 1:
            short.append(position)
        else:
            spanning.append(_Row(cost.of_sample(length) / size, size, [position]))
    # Costliest first, so that the rows of a round cost about the same.
    spanning.sort(key=lambda row: (-row.cost, row.positions))
    rounds, num_free = _rounds_of(spanning, sizes, num_ranks)
    num_rounds = max(-(-num_tokens // (num_ranks * max_tokens)), len(rounds), 1)
    rows = None
    while rows is None:
        num_single = sum(num_free) + (num_rounds - len(rounds)) * num_ranks
        rows = _fill_rows(lengths, short, spanning, num_single, max_tokens, cost)
        num_rounds += 1

    filled, single = rows[: len(spanning)], rows[len(spanning) :]
    single.sort(key=lambda row: (-row.cost, row.positions))
    ranks: list[Microbatches] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for first in range(num_rounds):
        of_round = [filled[i] for i in rounds[first]] if first < len(rounds) else []
        num_single = num_free[first] if first < len(rounds) else num_ranks
        _deal(of_round + single[:num_single], sizes, ranks, loads)
        single = single[num_single:]
    for microbatches in ranks:
        while microbatches and not microbatches[-1]:
            microbatches.pop()
    return ranks


def _rounds_of(
    rows: Sequence[_Row], sizes: Sequence[int], num_ranks: int
) -> tuple[list[list[int]], list[int]]:
    """Returns the indices of the rows of each round, and the ranks that each has left."""
    rounds: list[list[int]] = []
    num_free: list[int] = []
    first = dict.fromkeys(sizes, 0)  # no earlier round has so many ranks left
    for index, row in enumerate(rows):
        at = first[row.num_ranks]
        while at < len(rounds) and num_free[at] < row.num_ranks:
            at += 1
        first[row.num_ranks] = at
        if at == len(rounds):
            rounds.append([])
            num_free.append(num_ranks)
        rounds[at].append(index)
        num_free[at] -= row.num_ranks
    return rounds, num_free


def _fill_rows(
    lengths: Sequence[int],
    short: Sequence[int],
    spanning: Sequence[_Row],
    num_single: int,
    max_tokens: int,
    cost: MicrobatchCost,
) -> list[_Row] | None:
    """Returns the spanning rows, filled up, and those of one rank that are not empty.

    ``short`` are positions, longest first. None if a sample fits in no row.
    """
    sizes = [row.num_ranks for row in spanning] + [1] * num_single
    rows = [list(row.positions) for row in spanning] + [[] for _ in range(num_single)]
    space = [row.num_ranks * max_tokens - lengths[row.positions[0]] for row in spanning]
    space += [max_tokens] * num_single
    costs = [row.cost for row in spanning] + [0.0] * num_single
    # Two heaps: rows that the last sample fitted in, the cheapest first, and the others, those with
    # most space first. A row is looked at again only once a sample is short enough for it.
    least_costly = [(row_cost, row) for row, row_cost in enumerate(costs)]
    heapq.heapify(least_costly)
    too_full: list[tuple[int, int]] = []
    for position in short:
        length = lengths[position]
        while too_full and -too_full[0][0] >= length:
            row = heapq.heappop(too_full)[1]
            heapq.heappush(least_costly, (costs[row], row))
        while least_costly and rows[row := least_costly[0][1]] and space[row] < length:
            heapq.heappop(least_costly)
            heapq.heappush(too_full, (-space[row], row))
        if not least_costly:
            return None
        row = least_costly[0][1]
        costs[row] += cost.of_sample(length) / sizes[row]
        heapq.heapreplace(least_costly, (costs[row], row))
        rows[row].append(position)
        space[row] -= length
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
