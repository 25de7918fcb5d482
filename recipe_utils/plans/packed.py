"""Plan of packed rows, of which a long one is computed by several ranks together.

Example: 4 ranks of at most 100 tokens, up to 2 of them per row, and samples of 190, 60, 50 and 10 tokens.
The long one begins a row of ranks 0 and 1, the others fill rows of ranks 2 and 3: [60], [50, 10].
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.plans.rounds import Microbatches, longest_first


@dataclass
class _Row:
    round: int
    num_ranks: int
    space: int
    """Tokens that still fit."""
    cost: float = 0.0
    """On each of its ranks."""
    positions: list[int] = field(default_factory=list)

    def add(self, position: int, length: int, cost: float) -> None:
        self.positions.append(position)
        self.space -= length
        self.cost += cost / self.num_ranks


def plan_packed(
    lengths: Sequence[int],
    num_ranks: int = 1,
    *,
    batch_size: int = 1,
    max_tokens_per_microbatch: int | None = None,
    max_ranks_per_row: int = 1,
    cost: MicrobatchCost,
) -> list[Microbatches]:
    """Packs whole samples without padding into few rows of about equal cost.

    A sample longer than a rank's bound begins a row of 2, 4, ... ranks, as few as hold it. Longest
    first, each other sample goes into the row with the least cost per rank so far (Graham 1969,
    doi:10.1137/0117039) among those with space; if a sample fits in none, one more row per rank is
    opened.

    Arguments and the result are those of :func:`recipe_utils.plans.padded.plan_least_padding`;
    a microbatch is one row, ``max_tokens_per_microbatch`` bounds its tokens on each of its ranks,
    and ``max_ranks_per_row``, a power of two, the number of these. They are neighbors, and the
    first is a multiple of their number. A sample longer than the bound on the most ranks is computed
    on these.
    """
    max_tokens = max_tokens_per_microbatch or batch_size * max(lengths, default=1)
    costs = [cost.of_sample(length) for length in lengths]
    most = math.gcd(max_ranks_per_row, num_ranks)
    sizes = [min(1 << ((n - 1) // max_tokens).bit_length(), most) for n in lengths]
    short = [position for position in longest_first(lengths) if sizes[position] == 1]
    long = [position for position, size in enumerate(sizes) if size > 1]
    # Costliest first, so that the rows of a round cost about the same.
    long.sort(key=lambda position: (-costs[position] / sizes[position], position))
    num_tokens = sum(min(n, size * max_tokens) for n, size in zip(lengths, sizes, strict=True))
    num_rounds = max(-(-num_tokens // (num_ranks * max_tokens)), 1)
    filled = None
    while filled is None:
        num_free = [num_ranks] * num_rounds
        rows: list[_Row] = []
        for position in long:
            size = sizes[position]
            at = next((i for i, free in enumerate(num_free) if free >= size), len(num_free))
            num_free += [num_ranks] * (at == len(num_free))
            num_free[at] -= size
            rows.append(_Row(at, size, size * max_tokens))
            rows[-1].add(position, lengths[position], costs[position])
        rows += [_Row(at, 1, max_tokens) for at, n in enumerate(num_free) for _ in range(n)]
        filled = _filled(rows, short, lengths, costs)
        num_rounds += 1
    return _dealt(filled, num_ranks)


def _filled(
    rows: Sequence[_Row], short: Sequence[int], lengths: Sequence[int], costs: Sequence[float]
) -> list[_Row] | None:
    """Returns the rows with short samples, given longest first; without empty ones. None if one fits in no row.

    A round with a long sample lasts as long as that, so its other rows are filled up to that first.
    """
    levels: dict[int, float] = {}
    for row in rows:
        levels[row.round] = max(levels.get(row.round, 0.0), row.cost)

    def entry(index: int) -> tuple[float, int]:
        return rows[index].cost - levels[rows[index].round], index

    # Two heaps: rows that the last sample fitted in, the cheapest first, and the others, those with
    # most space first. A row is looked at again only once a sample is short enough for it.
    least_costly = [entry(index) for index in range(len(rows))]
    heapq.heapify(least_costly)
    too_full: list[tuple[int, int]] = []
    for position in short:
        length = lengths[position]
        while too_full and -too_full[0][0] >= length:
            heapq.heappush(least_costly, entry(heapq.heappop(too_full)[1]))
        while least_costly and (row := rows[least_costly[0][1]]).positions and row.space < length:
            heapq.heappush(too_full, (-row.space, heapq.heappop(least_costly)[1]))
        if not least_costly:
            return None
        row.add(position, length, costs[position])
        heapq.heapreplace(least_costly, entry(least_costly[0][1]))
    return [row for row in rows if row.positions]


def _dealt(rows: Sequence[_Row], num_ranks: int) -> list[Microbatches]:
    """Returns the microbatches of each rank: in each round, the costliest row where the load is least."""
    single = [row for row in rows if row.num_ranks == 1]
    single.sort(key=lambda row: (-row.cost, row.positions))
    ranks: list[Microbatches] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for index in range(1 + max((row.round for row in rows), default=-1)):
        of_round = [row for row in rows if row.round == index and row.num_ranks > 1]
        num_free = num_ranks - sum(row.num_ranks for row in of_round)
        of_round, single = of_round + single[:num_free], single[num_free:]
        of_round.sort(key=lambda row: -row.cost)
        # Most ranks first, so that the first rank of a row is a multiple of their number.
        for size in sorted({row.num_ranks for row in of_round}, reverse=True):
            free = [first for first in range(0, num_ranks, size) if len(ranks[first]) == index]
            free.sort(key=lambda first: sum(loads[first : first + size]))
            of_size = (row for row in of_round if row.num_ranks == size)
            for first, row in zip(free, of_size, strict=False):
                for rank in range(first, first + size):
                    ranks[rank].append(row.positions)
                    loads[rank] += row.cost
        for microbatches in ranks:
            microbatches += [[]] * (len(microbatches) == index)
    for microbatches in ranks:
        while microbatches and not microbatches[-1]:
            microbatches.pop()
    return ranks
