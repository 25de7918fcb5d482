"""Plans partition an update step's samples, keep their bounds, and least_padding finds the cheapest."""

import heapq
import random
import types
from functools import partial
from itertools import chain
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_utils.plans import packed
from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.plans.packed import plan_packed
from recipe_utils.plans.padded import plan_in_order, plan_least_padding
from recipe_utils.plans.rounds import Part, part_of

LENGTHS = st.lists(st.integers(1, 600), max_size=40)
NUM_RANKS = st.integers(1, 9)
OVER_RANKS = st.sampled_from(["least_padding", "packed"])
COST = MicrobatchCost(64, 300)
PLANS = {
    "in_order": plan_in_order,
    "least_padding": partial(plan_least_padding, cost=COST),
    "packed": partial(plan_packed, cost=COST),
}


def num_positions(name, lengths, microbatch):
    of_samples = [lengths[position] for position in microbatch]
    return sum(of_samples) if name == "packed" else len(of_samples) * max(of_samples)


def cost_of(name, lengths, microbatch):
    of_samples = [lengths[position] for position in microbatch]
    if name != "packed":
        of_samples = [max(of_samples)] * len(of_samples)
    return COST.overhead + sum(map(COST.of_sample, of_samples))


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
        loads = [sum(map(COST.of_sample, of_rank)) for of_rank in in_order]
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
            parts = [part_of(ranks, rank, index) for rank in of_row]
            assert parts == [Part(i, len(of_row)) for i in range(len(of_row))]
        rounds.append([(ranks[0], len(ranks), row) for row, ranks in holders.items()])
    return rounds


@given(
    LENGTHS,
    st.sampled_from([1, 2, 4, 6, 8]),
    st.integers(20, 700),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([300.0, float("inf")]),
)
def test_long_samples_have_aligned_groups_of_ranks_and_each_sample_one_row(
    lengths, num_ranks, max_tokens, max_ranks, equal_length
):
    limits = {"max_tokens_per_microbatch": max_tokens, "cost": MicrobatchCost(64, equal_length)}
    ranks = plan_packed(lengths, num_ranks, max_ranks_per_row=max_ranks, **limits)
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
        assert ranks == plan_packed(lengths, num_ranks, **limits)


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
