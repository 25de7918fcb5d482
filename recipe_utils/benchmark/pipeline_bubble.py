"""Computes the idle time of pipeline schedules, one per accumulation group or one per update step.

    python -m recipe_utils.benchmark.pipeline_bubble
    python -m recipe_utils.benchmark.pipeline_bubble --num_ranks 4 --num_groups 2 8
    python -m recipe_utils.benchmark.pipeline_bubble --teacher

Simulates the action order of PyTorch's schedules. A forward through the layers of a rank takes one
slot, a backward two, each half of a split backward one; sending takes no time. A group has as many
microbatches as ranks, the minimum of 1F1B, and starts after the previous group, as in a loop over
``schedule.step``.

A teacher computes all microbatches of a group or an update step in a forward-only schedule, one
stage per rank, before the student. There is no barrier: the first ranks start the student while the
last ones compute the teacher.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from recipe_utils.model.pipeline.schedule import SCHEDULES, has_several_stages_per_rank

# PyTorch's letters: forward, backward, backward for inputs, backward for weights.
SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}
TEACHER = "T"


class Action(NamedTuple):
    """Computation of one microbatch in one stage."""

    kind: str
    stage: int
    microbatch: int


class Span(NamedTuple):
    """Time of an action [slots]."""

    action: Action
    start: Fraction
    stop: Fraction


def order_of_ranks(schedule: str, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Returns the actions of each rank in the order of PyTorch's schedule."""
    several = has_several_stages_per_rank(schedule)
    stages_per_rank = 2 if several else 1

    class Stage:
        """Attributes of a stage that determine a schedule's order."""

        num_stages = num_ranks * stages_per_rank
        group_size = num_ranks
        group_rank = stage_index = 0
        is_last = False
        submod = None

    stage: Any = Stage()
    made = SCHEDULES[schedule]([stage] * stages_per_rank if several else stage, num_microbatches)
    order: list[list[Action]] = []
    for rank in range(num_ranks):
        # Counted here: torch 2.13 lists the last rank's forwards of 1F1B from microbatch 1 on.
        microbatch: Counter[tuple[str, int]] = Counter()
        order.append([])
        for action in made.pipeline_order[rank]:
            if action is None or action.microbatch_index is None:
                continue
            key = str(action.computation_type.value), action.stage_index
            order[-1].append(Action(*key, microbatch[key]))
            microbatch[key] += 1
    return order


def order_after_teacher(schedule: str, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Returns the same order after GPipe forwards of a teacher."""
    teacher, student = (
        order_of_ranks(each, num_ranks, num_microbatches) for each in ("GPipe", schedule)
    )
    return [
        [action._replace(kind=TEACHER) for action in of_teacher if action.kind == "F"] + of_student
        for of_teacher, of_student in zip(teacher, student, strict=True)
    ]


def timeline(order: Sequence[Sequence[Action]], teacher_slots: int = 1) -> list[list[Span]]:
    """Returns the times of the actions of each rank. Actions start when their inputs are ready."""
    num_stages = 1 + max(action.stage for actions in order for action in actions)
    unit = Fraction(len(order), num_stages)  # a stage's share of the layers of a rank
    slots = {kind: number * unit for kind, number in SLOTS.items()}
    slots[TEACHER] = Fraction(teacher_slots)
    done: dict[Action, Fraction] = {}
    spans: list[list[Span]] = [[] for _ in order]
    while len(done) < sum(map(len, order)):
        num_done = len(done)
        for rank, actions in enumerate(order):
            for action in actions[len(spans[rank]) :]:
                needed = needs(action, num_stages, done)
                if needed is None:
                    break
                free = spans[rank][-1].stop if spans[rank] else Fraction(0)
                start = max(free, needed)
                done[action] = start + slots[action.kind]
                spans[rank].append(Span(action, start, done[action]))
        if len(done) == num_done:
            raise ValueError("the order of the ranks waits for itself")
    return spans


def needs(action: Action, num_stages: int, done: Mapping[Action, Fraction]) -> Fraction | None:
    """Returns the time when all inputs of an action are ready; None if one is not computed."""
    kind, stage, microbatch = action
    before: list[tuple[str, int]] = []
    if kind in ("F", TEACHER):
        before = [(kind, stage - 1)] if stage > 0 else []
    elif kind == "W":
        before = [("I", stage)]
    else:
        before = [("F", stage), *([("BI", stage + 1)] if stage + 1 < num_stages else [])]
    times = [Fraction(0)]
    for kinds, of_stage in before:
        found = [done[a] for k in kinds if (a := Action(k, of_stage, microbatch)) in done]
        if not found:
            return None
        times += found
    return max(times)


def idle_fraction(spans: Sequence[Sequence[Span]]) -> tuple[Fraction, Fraction]:
    """Returns the number and share of idle slots of all ranks until the last stop."""
    length = max(of_rank[-1].stop for of_rank in spans)
    busy = sum(span.stop - span.start for of_rank in spans for span in of_rank)
    return length * len(spans) - busy, 1 - busy / (length * len(spans))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table with a row for each combination."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--num_groups", type=int, nargs="+", default=[4])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    help_of_teacher = "adds a teacher whose forward takes so many slots (default: 1 and 6)"
    parser.add_argument("--teacher", type=int, nargs="*", metavar="SLOTS", help=help_of_teacher)
    args = parser.parse_args(arguments)
    teachers = [None] if args.teacher is None else args.teacher or [1, 6]
    print(
        "| ranks p | microbatches m | schedule | teacher [slots] | idle slots: groups of p | whole step "
        "| idle share: groups | whole step | (p - 1) / (m + p - 1) | whole step is faster by |"
    )
    print("| --- " * 10 + "|")
    for p, groups, schedule, slots in itertools.product(
        args.num_ranks, args.num_groups, args.schedules, teachers
    ):
        m = p * groups
        order = order_of_ranks if slots is None else order_after_teacher
        idle, share = idle_fraction(timeline(order(schedule, p, p), slots or 1))
        whole_idle, whole_share = idle_fraction(timeline(order(schedule, p, m), slots or 1))
        print(
            f"| {p} | {m} | {schedule} | {slots or ''} | {float(idle * groups):g} | {float(whole_idle):g} "
            f"| {float(share):.1%} | {float(whole_share):.1%} | {(p - 1) / (m + p - 1):.1%} "
            f"| {float((1 - whole_share) / (1 - share)):.2f} |"
        )


if __name__ == "__main__":
    main()
