import itertools
from fractions import Fraction

import pytest

from recipe_utils.benchmark.pipeline_bubble import idle_fraction, order_of_ranks, timeline


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 16), (8, 8), (8, 32)])
def test_the_idle_share_is_the_textbook_s(schedule, p, m):
    _, share = idle_fraction(timeline(order_of_ranks(schedule, p, m)))
    assert share == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_every_microbatch_runs_once_in_every_stage_and_no_rank_does_two_things(schedule):
    order = order_of_ranks(schedule, 4, 8)
    num_stages = 8 if "Interleaved" in schedule else 4
    actions = [action for of_rank in order for action in of_rank]
    forwards = [(a.stage, a.microbatch) for a in actions if a.kind == "F"]
    assert sorted(forwards) == [(s, m) for s in range(num_stages) for m in range(8)]
    backwards = [(a.stage, a.microbatch) for a in actions if a.kind in ("B", "W")]
    assert sorted(backwards) == sorted(forwards)
    for of_rank in timeline(order):
        assert all(a.stop <= b.start for a, b in itertools.pairwise(of_rank))
