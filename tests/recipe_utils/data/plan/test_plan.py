"""Plans partition an update step's samples, keep their bounds, and least_padding finds the cheapest."""

import random
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_utils.data.plan import PLANS, plan_in_order, plan_least_padding
from recipe_utils.data.plan.cost import MicrobatchCost

LENGTHS = st.lists(st.integers(1, 600), max_size=40)
NUM_RANKS = st.integers(1, 9)
OVER_RANKS = st.sampled_from(["least_padding", "packed"])
COST = MicrobatchCost(64, 300)


def num_positions(name, lengths, microbatch):
    of_samples = [lengths[position] for position in microbatch]
    return sum(of_samples) if name == "packed" else len(of_samples) * max(of_samples)


def cost_of(name, lengths, microbatch):
    of_samples = [lengths[position] for position in microbatch]
    if name != "packed":
        of_samples = [max(of_samples)] * len(of_samples)
    return COST.overhead_slots + sum(map(COST.of_sample, of_samples))


@given(LENGTHS, NUM_RANKS, st.integers(1, 9), st.sampled_from(sorted(PLANS)))
def test_every_sample_is_in_exactly_one_microbatch_and_none_is_empty(
    lengths, num_ranks, batch_size, name
):
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
    ranks = PLANS[name](lengths, num_ranks, max_tokens_per_microbatch=max_tokens, cost=COST)
    for microbatch in chain.from_iterable(ranks):
        assert num_positions(name, lengths, microbatch) <= max_tokens or len(microbatch) == 1
    counts = [len(microbatches) for microbatches in ranks]
    assert max(counts) - min(counts) <= 1
    if max(counts) > min(counts):
        last_round = [rank[-1] for rank in ranks if len(rank) == max(counts)]
        assert all(len(microbatch) == 1 for microbatch in last_round)


@pytest.mark.parametrize("name", ["least_padding", "packed"])
@pytest.mark.parametrize("num_ranks", [8, 64])
def test_no_rank_computes_much_more_than_the_mean(num_ranks, name):
    """16 samples a rank, lengths spread as widely as documents are."""
    rng = random.Random(num_ranks)
    lengths = [min(20 + int(rng.lognormvariate(3.8, 0.9)), 512) for _ in range(16 * num_ranks)]
    ranks = PLANS[name](lengths, num_ranks, max_tokens_per_microbatch=2048, cost=COST)
    loads = [sum(cost_of(name, lengths, m) for m in microbatches) for microbatches in ranks]
    assert max(loads) / (sum(loads) / num_ranks) < 1.03
    in_order = [lengths[16 * rank : 16 * rank + 16] for rank in range(num_ranks)]
    undealt = [sum(map(COST.of_sample, of_rank)) for of_rank in in_order]
    assert max(undealt) / (sum(undealt) / num_ranks) > 1.1


@given(st.lists(st.integers(1, 600), min_size=1, max_size=40), NUM_RANKS)
def test_packed_opens_no_more_rows_than_the_tokens_need_plus_what_does_not_fit(lengths, num_ranks):
    """Half of the rows that a round adds could not be spared: else two of them were one."""
    ranks = PLANS["packed"](lengths, num_ranks, max_tokens_per_microbatch=600, cost=COST)
    num_rounds = max(map(len, ranks))
    if num_rounds > 1:
        assert sum(lengths) > 600 * num_ranks * (num_rounds - 1) / 2


def partitions(items):
    """All set partitions."""
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
