"""Plans partition an update step's samples, keep their bounds, and least_padding finds the cheapest."""

import heapq
import math
import random
import types
from functools import partial
from itertools import chain, zip_longest
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_utils.plans import packed
from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.plans.packed import plan_packed
from recipe_utils.plans.padded import plan_in_order, plan_least_padding
from recipe_utils.plans.rounds import Share, share_of

LENGTHS = st.lists(st.integers(1, 600), max_size=40)
NUM_RANKS = st.integers(1, 9)
OVER_RANKS = st.sampled_from(["least_padding", "packed", "filled"])
COST = MicrobatchCost(64, 300)
PLANS = {
    "in_order": plan_in_order,
    "least_padding": partial(plan_least_padding, cost=COST),
    "packed": partial(plan_packed, cost=COST),
    "filled": partial(plan_packed, cost=COST, fills_rows=True),
}


def num_positions(name, lengths, microbatch):
    of_samples = [lengths[position] for position in microbatch]
    return len(of_samples) * max(of_samples) if name == "least_padding" else sum(of_samples)


def cost_of(name, lengths, microbatch):
    of_samples = [lengths[position] for position in microbatch]
    if name != "packed":
        of_samples = [max(of_samples)] * len(of_samples)
    return COST.overhead + sum(map(COST.sample_cost, of_samples))


@given(LENGTHS, NUM_RANKS, st.integers(1, 9), st.sampled_from(sorted(PLANS)))
def test_every_sample_is_in_exactly_one_microbatch_and_none_is_empty(lengths, num_ranks, batch_size, name):
    ranks = PLANS[name](lengths, num_ranks, batch_size=batch_size)
    assert len(ranks) == num_ranks
    microbatches = list(chain.from_iterable(ranks))
    assert sorted(chain.from_iterable(microbatches)) == list(range(len(lengths)))
    assert all(microbatches)


def test_in_order_keeps_the_order_and_the_batch_size():
    assert plan_in_order([5, 1, 9, 2, 2], batch_size=2) == [[[0, 1], [2, 3], [4]]]


@given(LENGTHS, NUM_RANKS, st.integers(1, 2000), OVER_RANKS)
def test_microbatches_keep_the_bound_and_ranks_get_equally_many_if_samples_suffice(
    lengths, num_ranks, max_tokens, name
):
    """Only a single long sample exceeds the bound. A rank gets at most one microbatch fewer, and only
    if every microbatch of the last round holds a single sample."""
    ranks = PLANS[name](lengths, num_ranks, max_tokens_per_microbatch=max_tokens)
    for microbatch in chain.from_iterable(ranks):
        assert num_positions(name, lengths, microbatch) <= max_tokens or len(microbatch) == 1
    counts = [len(microbatches) for microbatches in ranks]
    assert max(counts) - min(counts) <= 1
    if max(counts) > min(counts):
        last_round = [rank[-1] for rank in ranks if len(rank) == max(counts)]
        assert all(len(microbatch) == 1 for microbatch in last_round)


@pytest.mark.parametrize(("name", "bound"), [("least_padding", 1.15), ("packed", 1.03)])
@pytest.mark.parametrize("num_ranks", [8, 64])
def test_no_rank_computes_much_more_than_the_mean(num_ranks, name, bound):
    """There are 16 samples per rank, with lengths as different as those of documents; mean of several draws."""
    planned, undealt = [], []
    for seed in range(1 + 80 // num_ranks):
        rng = random.Random(seed)
        lengths = [min(20 + int(rng.lognormvariate(3.8, 0.9)), 512) for _ in range(16 * num_ranks)]
        ranks = PLANS[name](lengths, num_ranks, max_tokens_per_microbatch=2048)
        loads = [sum(cost_of(name, lengths, m) for m in microbatches) for microbatches in ranks]
        planned.append(max(loads) / fmean(loads))
        in_order = [lengths[16 * rank : 16 * rank + 16] for rank in range(num_ranks)]
        loads = [sum(map(COST.sample_cost, of_rank)) for of_rank in in_order]
        undealt.append(max(loads) / fmean(loads))
    assert fmean(planned) < bound
    assert fmean(undealt) > 1.2


@given(st.lists(st.integers(1, 600), min_size=1, max_size=40), NUM_RANKS)
def test_packed_opens_no_more_rows_than_the_tokens_need_plus_what_does_not_fit(lengths, num_ranks):
    """At least half of the rows that a round adds are needed: otherwise two of them would fit in one."""
    ranks = PLANS["packed"](lengths, num_ranks, max_tokens_per_microbatch=600)
    num_rounds = max(map(len, ranks))
    if num_rounds > 1:
        assert sum(lengths) > 600 * num_ranks * (num_rounds - 1) / 2


def time_over_tokens(lengths, num_ranks, max_tokens, multiple, **options):
    """Returns the padded positions of the longest row of each round, on all ranks, over the tokens."""
    cost = MicrobatchCost(400)
    ranks = plan_packed(lengths, num_ranks, max_tokens_per_microbatch=max_tokens, cost=cost, **options)
    assert sorted(chain.from_iterable(chain.from_iterable(ranks))) == list(range(len(lengths)))
    longest = (max(sum(lengths[i] for i in row) for row in rows) for rows in zip_longest(*ranks, fillvalue=()))
    return num_ranks * sum(math.ceil(length / multiple) * multiple for length in longest) / sum(lengths)


# Update steps of a chat: without few lengths, with a quarter of the budget, and with full rows first.
@pytest.mark.parametrize(
    ("num_ranks", "num_samples", "max_tokens", "by_cost", "filled"),
    [
        (1, 64, 8192, 1.1, 1.05),
        (1, 256, 16384, 1.05, 1.03),
        (8, 64, 8192, 1.2, 1.3),
        (8, 256, 8192, 1.13, 1.1),
        (64, 1024, 8192, 1.15, 1.25),
        (64, 4096, 8192, 1.15, 1.05),
    ],
)
def test_rows_of_any_length_cost_three_percent_and_full_rows_the_least_of_few(
    num_ranks, num_samples, max_tokens, by_cost, filled
):
    """Time of the slowest rank over its share of tokens, mean of ten draws of log-normal lengths."""
    times = []
    for seed in range(10):
        rng = random.Random(seed)
        lengths = [max(min(int(300 * rng.lognormvariate(0, 0.9)), 2048), 1) for _ in range(num_samples)]
        case = lengths, num_ranks, max_tokens
        few = max_tokens // 4
        times.append(
            [
                time_over_tokens(*case, multiple=128),
                time_over_tokens(*case, multiple=few),
                time_over_tokens(*case, multiple=few, fills_rows=True),
            ]
        )
    of_any, of_few, of_filled = map(fmean, zip(*times, strict=True))
    assert of_any < 1.03
    assert of_few > by_cost
    assert of_filled < filled


def test_one_round_is_shared_by_cost_whether_or_not_rows_are_filled():
    lengths = [7, 5, 1, 1]
    limits = {"max_tokens_per_microbatch": 12, "cost": MicrobatchCost(0)}
    assert sorted(plan_packed(lengths, **limits)[0]) == [[0], [1, 2, 3]]
    assert plan_packed(lengths, fills_rows=True, **limits) == [[[0, 1], [2, 3]]]
    assert plan_packed(lengths, 2, fills_rows=True, **limits) == plan_packed(lengths, 2, **limits)


def test_filling_rows_takes_no_time_that_grows_with_samples_times_rows():
    """8,192 samples are taken by 1,000 rows: each row looks at those that fit, not at all that are left."""
    rng = random.Random(0)
    samples = packed.longest_first(lengths := [rng.randrange(1, 2048) for _ in range(8192)])

    class Counted(list):
        num_reads = 0

        def __getitem__(self, index):
            Counted.num_reads += 1
            return super().__getitem__(index)

    rest = Counted(packed._Sample(i, lengths[i], 1.0, 1) for i in samples)
    while rest:
        packed._fill(packed._OpenRow(0, 1, 8192), rest)
    assert Counted.num_reads < 40 * len(lengths)


def partitions(items):
    """Yields all set partitions."""
    if not items:
        yield []
        return
    first, *rest = items
    for partition in partitions(rest):
        yield [[first], *partition]
        for index, part in enumerate(partition):
            yield [*partition[:index], [first, *part], *partition[index + 1 :]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.integers(1, 120),
    st.sampled_from([0.0, 3.0, 64.0]),
    st.sampled_from([20.0, float("inf")]),
)
def test_no_partition_costs_less(lengths, max_tokens, overhead, equal_attention_length):
    cost = MicrobatchCost(overhead, equal_attention_length)

    def total(microbatches):
        return sum(cost(len(m), max(lengths[i] for i in m)) for m in microbatches)

    allowed = [
        partition
        for partition in partitions(list(range(len(lengths))))
        if all(len(m) == 1 or len(m) * max(lengths[i] for i in m) <= max_tokens for m in partition)
    ]
    (planned,) = plan_least_padding(lengths, max_tokens_per_microbatch=max_tokens, cost=cost)
    assert total(planned) == pytest.approx(min(map(total, allowed)))


def test_attention_and_overhead_enter_the_cost():
    assert MicrobatchCost(64, float("inf"))(3, 100) == 364
    assert MicrobatchCost(0, 100)(1, 100) == 200


# ---- Rows that span ranks ---------------------------------------------------------------------------------


def rows_of(ranks):
    """Returns the rows of each round: first rank, number of ranks, positions."""
    rounds = []
    for index in range(max(map(len, ranks), default=0)):
        holders = {}
        for rank, microbatches in enumerate(ranks):
            if row := microbatches[index : index + 1]:
                holders.setdefault(tuple(row[0]), []).append(rank)
        holders.pop((), None)
        for of_row in holders.values():
            assert of_row == list(range(of_row[0], of_row[0] + len(of_row)))
            shares = [share_of(ranks, rank, index) for rank in of_row]
            assert shares == [Share(i, len(of_row)) for i in range(len(of_row))]
        rounds.append([(ranks[0], len(ranks), row) for row, ranks in holders.items()])
    return rounds


@given(
    LENGTHS,
    st.sampled_from([1, 2, 4, 6, 8]),
    st.integers(20, 700),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([300.0, float("inf")]),
    st.booleans(),
)
def test_long_samples_have_aligned_groups_of_ranks_and_each_sample_one_row(
    lengths, num_ranks, max_tokens, max_ranks, equal_length, fills_rows
):
    limits = {"max_tokens_per_microbatch": max_tokens, "cost": MicrobatchCost(64, equal_length)}
    ranks = plan_packed(lengths, num_ranks, max_ranks_per_row=max_ranks, fills_rows=fills_rows, **limits)
    rounds = rows_of(ranks)
    largest = min(max_ranks, num_ranks & -num_ranks)
    placed = [position for rows in rounds for _, _, row in rows for position in row]
    assert sorted(placed) == list(range(len(lengths)))
    for first, size, row in (each for rows in rounds for each in rows):
        assert size <= largest
        assert size & (size - 1) == 0
        assert first % size == 0
        num_tokens = sum(lengths[position] for position in row)
        assert num_tokens <= size * max_tokens or (len(row) == 1 and size == largest)
        longest = max(lengths[position] for position in row)
        assert size == 1 or longest > size // 2 * max_tokens
    if max_ranks == 1 or max(lengths, default=0) <= max_tokens:
        assert ranks == plan_packed(lengths, num_ranks, fills_rows=fills_rows, **limits)


def test_a_round_is_filled_up_to_its_long_row_first():
    """Two rounds have space for all; the first lasts as long as the sample on two ranks anyway."""
    limits = {"max_tokens_per_microbatch": 100, "cost": MicrobatchCost(0)}
    ranks = plan_packed([190, *[10] * 24], 4, max_ranks_per_row=2, **limits)
    assert [len(row) for row in (ranks[2][0], ranks[3][0])] == [10, 10]


def test_planning_looks_at_a_full_row_again_only_for_a_sample_that_fits(monkeypatch):
    """16,384 samples on 64 ranks: heap operations grow with samples, not with samples times rows."""
    num_calls = 0

    def count(heap, item):
        nonlocal num_calls
        num_calls += 1
        return heapq.heappush(heap, item)

    rng = random.Random(0)
    lengths = [min(16 + int(rng.lognormvariate(7.7, 0.8)), 16384) for _ in range(16384)]
    monkeypatch.setattr(packed, "heapq", types.SimpleNamespace(**{**vars(heapq), "heappush": count}))  # fmt: skip
    plan_packed(lengths, 64, max_tokens_per_microbatch=16384, cost=MicrobatchCost(75, 30500))
    assert num_calls < 2 * len(lengths)
