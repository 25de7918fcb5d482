import itertools
from fractions import Fraction

import pytest

from recipe_utils.benchmark.pipeline_bubble import (
    TEACHER,
    idle_fraction,
    main,
    order_after_teacher,
    order_of_ranks,
    timeline,
)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 16), (8, 32)])
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


@pytest.mark.parametrize("slots", [1, 6])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 16)])
def test_the_student_s_first_forwards_run_beside_the_teacher_s_last(slots, p, m):
    spans = timeline(order_after_teacher("1F1B", p, m), slots)
    of_teacher = (m + p - 1) * slots
    # The student fills its pipeline meanwhile; only its backwards' way to the first rank is left.
    assert max(of_rank[-1].stop for of_rank in spans) == of_teacher + 3 * m + 2 * (p - 1)
    _, share = idle_fraction(spans)
    assert share == 1 - Fraction(m * (slots + 3), of_teacher + 3 * m + 2 * (p - 1))


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_a_teacher_has_its_stage_on_every_rank_and_is_done_before_the_student_s_loss(schedule):
    spans = timeline(order_after_teacher(schedule, 4, 8), 2)
    stops = {s.action: s.stop for of_rank in spans for s in of_rank}
    of_teacher = [action for action in stops if action.kind == TEACHER]
    assert sorted((a.stage, a.microbatch) for a in of_teacher) == [
        (stage, m) for stage in range(4) for m in range(8)
    ]
    last_stage = max(action.stage for action in stops)
    begins = [s.start for s in spans[-1] if s.action.stage == last_stage and s.action.kind == "F"]
    assert min(begins) >= max(stops[action] for action in of_teacher)


def test_the_table_has_each_teacher(capsys):
    main(["--num_ranks", "2", "4", "--schedules", "1F1B", "--teacher"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[:4] for row in cells] == [
        [p, m, "1F1B", s] for p, m in (("2", "8"), ("4", "16")) for s in "16"
    ]
    assert [cells[-1][i] for i in (6, 7, 9)] == ["40.0%", "14.3%", "1.43"]
