"""A plan puts every sample into exactly one microbatch, within its limits."""

import pytest

from recipe_utils.plan import PLANS, plan_in_order


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("num_samples", [0, 1, 5, 8, 9])
@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_every_sample_is_in_exactly_one_microbatch(plan, num_samples, batch_size):
    lengths = [7 * (i % 3) + 1 for i in range(num_samples)]
    microbatches = plan(lengths, batch_size=batch_size)
    assert sorted(i for microbatch in microbatches for i in microbatch) == list(range(num_samples))
    assert all(0 < len(microbatch) <= batch_size for microbatch in microbatches)


def test_in_order_fills_each_microbatch_before_the_next():
    microbatches = plan_in_order([9, 1, 5, 5, 2], batch_size=2)
    assert [i for microbatch in microbatches for i in microbatch] == [0, 1, 2, 3, 4]
    assert [len(microbatch) for microbatch in microbatches] == [2, 2, 1]
