"""Plan of packed rows, of which a long one is computed by several ranks together.

Example: samples of 5, 3, 9 and 2 tokens on two ranks of at most 10 tokens per microbatch. 19 tokens need one
round of two rows. Longest first, each sample goes into the cheaper row with space: 9 into the first, 5, 3 and 2
into the second. The costlier row goes to the rank with the least load: rank 0 computes [5, 3, 2], rank 1 [9].
Sorted and padded in twos, the same samples are 2 x 9 + 2 x 3 = 24 positions instead of 19.

Where rows have few lengths, full ones first waste less. One rank with rows of 3, 6, 9 or 12 tokens computes samples of
7, 5, 1 and 1 as [7] and [5, 1, 1], each padded to 9. Filled, the rows are [7, 5] and [1, 1], of 12 and 3 positions.

With up to two ranks per row, four ranks of at most 100 tokens and samples of 190, 60, 50 and 10 tokens, the long one
begins a row of ranks 0 and 1, which compute 95 tokens each. The others fill rows of ranks 2 and 3: [60] and [50, 10].
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.plans.rounds import Microbatches, longest_first


class _Sample(NamedTuple):
    position: int
    length: int
    cost: float
    num_ranks: int
    """Ranks of its row: as few as hold it."""


@dataclass
class _OpenRow:
    round: int
    num_ranks: int
    space: int
    """Tokens that still fit."""
    cost: float = 0.0
    """On each of its ranks."""
    positions: list[int] = field(default_factory=list)

    def fits(self, length: int) -> bool:
        return length <= self.space or not self.positions  # a sample above the bound has a row of its own

    def add(self, sample: _Sample) -> None:
        self.positions.append(sample.position)
        self.space -= sample.length
        self.cost += sample.cost / self.num_ranks


def plan_packed(
    lengths: Sequence[int],
    num_ranks: int = 1,
    *,
    batch_size: int = 1,
    max_tokens_per_microbatch: int | None = None,
    max_ranks_per_row: int = 1,
    fills_rows: bool = False,
    cost: MicrobatchCost,
) -> list[Microbatches]:
    """Packs whole samples without padding into few rows of about equal cost.

    A sample longer than a rank's bound begins a row of 2, 4, ... ranks, as few as hold it. Longest first, each other
    sample goes into the row with the least cost per rank so far (Graham 1969, doi:10.1137/0117039) among those with
    space; if a sample fits in none, one more row per rank is opened. With ``fills_rows``, the rows of all rounds but
    the last are filled one after the other, and only the rest is shared by cost.

    Arguments and the result are those of :func:`recipe_utils.plans.padded.plan_least_padding`; a microbatch is one row,
    ``max_tokens_per_microbatch`` bounds its tokens on each of its ranks, and ``max_ranks_per_row``, a power of two, the
    number of these. They are neighbors, and the first is a multiple of their number. A sample longer than the bound on
    the most ranks is computed on these.
    """
    max_tokens = max_tokens_per_microbatch or batch_size * max(lengths, default=1)
    most_ranks = math.gcd(max_ranks_per_row, num_ranks)
    samples = []
    for position in longest_first(lengths):
        length = lengths[position]
        ranks_to_hold_it = 1 << ((length - 1) // max_tokens).bit_length()  # the next power of two
        samples.append(_Sample(position, length, cost.sample_cost(length), min(ranks_to_hold_it, most_ranks)))
    short = [sample for sample in samples if sample.num_ranks == 1]
    long = [sample for sample in samples if sample.num_ranks > 1]
    # Costliest first, so that the rows of a round cost about the same.
    long.sort(key=lambda sample: (-sample.cost / sample.num_ranks, sample.position))

    # As few rounds as the tokens need; one more as long as whole samples leave too much space unused.
    num_tokens = sum(min(sample.length, sample.num_ranks * max_tokens) for sample in samples)
    num_rounds = max(-(-num_tokens // (num_ranks * max_tokens)), 1)
    num_full = num_rounds - 1 if fills_rows else 0
    while True:
        opened, rest = _opened(long, num_ranks, max_tokens, num_rounds), list(short)
        full = [row for row in opened if row.round < num_full]
        for row in full:
            _fill(row, rest)
        shared = _filled([row for row in opened if row.round >= num_full], rest)
        if shared is not None:
            return _dealt([row for row in full if row.positions] + shared, num_ranks)
        num_rounds += 1


def _opened(long: Sequence[_Sample], num_ranks: int, max_tokens: int, num_rounds: int) -> list[_OpenRow]:
    """Returns rows that use every rank in at least ``num_rounds`` rounds: one per long sample, and empty ones."""
    num_free = [num_ranks] * num_rounds
    rows: list[_OpenRow] = []
    for sample in long:
        index = next((i for i, free in enumerate(num_free) if free >= sample.num_ranks), len(num_free))
        if index == len(num_free):
            num_free.append(num_ranks)
        num_free[index] -= sample.num_ranks
        rows.append(_OpenRow(index, sample.num_ranks, sample.num_ranks * max_tokens))
        rows[-1].add(sample)
    return rows + [_OpenRow(index, 1, max_tokens) for index, free in enumerate(num_free) for _ in range(free)]


def _fill(row: _OpenRow, samples: list[_Sample]) -> None:
    """Moves the longest sample that fits, given longest first, to a row until none does."""
    index = 0
    while index < len(samples):
        if row.fits(samples[index].length):
            row.add(samples.pop(index))
        else:
            index = bisect_left(samples, -row.space, index, key=lambda sample: -sample.length)


def _filled(rows: Sequence[_OpenRow], short: Sequence[_Sample]) -> list[_OpenRow] | None:
    """Returns the rows with short samples, given longest first; without empty ones. None if one fits in no row."""
    # A round lasts as long as its long sample, so its other rows are filled up to that first.
    costs_before = dict[int, float]()
    for row in rows:
        costs_before[row.round] = max(costs_before.get(row.round, 0.0), row.cost)

    def added_cost(index: int) -> tuple[float, int]:
        return rows[index].cost - costs_before[rows[index].round], index

    # A row that a sample does not fit in waits among the full ones until a sample is short enough, so that
    # the work grows with samples and not with samples times rows.
    cheapest = [added_cost(index) for index in range(len(rows))]
    heapq.heapify(cheapest)
    with_most_space: list[tuple[int, int]] = []  # (-space, index)
    for sample in short:
        while with_most_space and -with_most_space[0][0] >= sample.length:
            heapq.heappush(cheapest, added_cost(heapq.heappop(with_most_space)[1]))
        while cheapest and not rows[cheapest[0][1]].fits(sample.length):
            index = heapq.heappop(cheapest)[1]
            heapq.heappush(with_most_space, (-rows[index].space, index))
        if not cheapest:
            return None
        index = cheapest[0][1]
        rows[index].add(sample)
        heapq.heapreplace(cheapest, added_cost(index))
    return [row for row in rows if row.positions]


def _dealt(rows: Sequence[_OpenRow], num_ranks: int) -> list[Microbatches]:
    """Returns the microbatches of each rank: in each round, the costliest row where the load is least."""
    single = [row for row in rows if row.num_ranks == 1]
    single.sort(key=lambda row: (-row.cost, row.positions))
    ranks: list[Microbatches] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for index in range(1 + max((row.round for row in rows), default=-1)):
        # A round's rows: those of its long samples, and the costliest single ones that are left.
        round_rows = [row for row in rows if row.round == index and row.num_ranks > 1]
        num_free = num_ranks - sum(row.num_ranks for row in round_rows)
        round_rows, single = round_rows + single[:num_free], single[num_free:]
        round_rows.sort(key=lambda row: -row.cost)
        # Most ranks first, so that the first rank of a row is a multiple of their number.
        for size in sorted({row.num_ranks for row in round_rows}, reverse=True):
            free = [first for first in range(0, num_ranks, size) if len(ranks[first]) == index]
            free.sort(key=lambda first: sum(loads[first : first + size]))
            rows_of_size = (row for row in round_rows if row.num_ranks == size)
            for first, row in zip(free, rows_of_size, strict=False):
                for rank in range(first, first + size):
                    ranks[rank].append(row.positions)
                    loads[rank] += row.cost
        # A rank without a row has an empty place, so that the shares of later rows meet in one round.
        for microbatches in ranks:
            microbatches += [[]] * (len(microbatches) == index)
    for microbatches in ranks:
        while microbatches and not microbatches[-1]:
            microbatches.pop()
    return ranks
