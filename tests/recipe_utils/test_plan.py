"""Plans partition an update step's samples, keep their bounds, and least_padding finds the cheapest."""

import subprocess
import sys
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_utils.plan import PLANS, MicrobatchCost, plan_in_order, plan_least_padding

LENGTHS = st.lists(st.integers(1, 600), max_size=40)


@given(LENGTHS, st.integers(1, 9), st.sampled_from(sorted(PLANS)))
def test_every_sample_is_in_exactly_one_microbatch_and_none_is_empty(lengths, batch_size, name):
    microbatches = PLANS[name](lengths, batch_size=batch_size)
    assert sorted(chain.from_iterable(microbatches)) == list(range(len(lengths)))
    assert all(microbatches)


def test_in_order_keeps_the_order_and_the_batch_size():
    assert plan_in_order([5, 1, 9, 2, 2], batch_size=2) == [[0, 1], [2, 3], [4]]


@given(LENGTHS, st.integers(1, 2000))
def test_no_microbatch_exceeds_the_bound_but_a_single_long_sample(lengths, max_tokens):
    for microbatch in plan_least_padding(lengths, 1, max_tokens):
        num_slots = len(microbatch) * max(lengths[position] for position in microbatch)
        assert num_slots <= max_tokens or len(microbatch) == 1


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
    planned = plan_least_padding(lengths, 1, max_tokens, cost)
    assert total(planned) == pytest.approx(min(map(total, allowed)))


def test_attention_and_overhead_enter_the_cost():
    assert MicrobatchCost(64, float("inf"))(3, 100) == 364
    assert MicrobatchCost(0, 100)(1, 100) == 200


def test_a_plan_imports_no_torch():
    script = "import sys, recipe_utils.plan; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
