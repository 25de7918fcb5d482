"""Counts the idle time of pipeline schedules: one schedule per accumulation group, and one per update step.

    python -m recipe_utils.benchmark.pipeline_bubble
    python -m recipe_utils.benchmark.pipeline_bubble --num_ranks 4 --num_groups 2 8 --plot timeline.png
    python -m recipe_utils.benchmark.pipeline_bubble --teacher

Each rank's order of forwards and backwards is PyTorch's own; nothing is trained. A forward through a rank's
layers takes one slot, a backward two, halves where the backward is split. Sending takes no time. Groups hold
as many microbatches as ranks, the fewest that 1F1B takes, and the next group starts when the one before is
through, as in a loop over ``schedule.step``.

With a teacher all of a group's or an update step's microbatches go through its forward-only schedule before the
student's begins; NeMo Automodel does so for each group. It has one stage per rank.
No barrier lies between both: the first ranks begin with the student while the last ones compute the teacher.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from recipe_utils.model.pipeline.schedule import SCHEDULES, has_several_stages_per_rank

# Letters are PyTorch's: forward, backward, its part for the inputs and that for the weights.
SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}
TEACHER = "T"


class Action(NamedTuple):
    """What a rank does without pause."""

    kind: str
    stage: int
    microbatch: int


class Span(NamedTuple):
    """When it does so [slots]."""

    action: Action
    start: Fraction
    stop: Fraction


def order_of_ranks(schedule: str, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """What each rank computes one after the other, as PyTorch's schedule has it."""
    several = has_several_stages_per_rank(schedule)
    stages_per_rank = 2 if several else 1

    class Stage:
        """All of a stage that a schedule looks at to make its order."""

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
    """The same after a teacher's forwards of these microbatches, whose order is GPipe's."""
    teacher, student = (
        order_of_ranks(each, num_ranks, num_microbatches) for each in ("GPipe", schedule)
    )
    return [
        [action._replace(kind=TEACHER) for action in of_teacher if action.kind == "F"] + of_student
        for of_teacher, of_student in zip(teacher, student, strict=True)
    ]


def timeline(order: Sequence[Sequence[Action]], teacher_slots: int = 1) -> list[list[Span]]:
    """When each rank computes what, if it starts as soon as what it needs is there.

    A forward needs that of the stage before, a backward that of the stage after and its own forward, the
    part for the weights the one for the inputs.

    Args:
        order: of each rank.
        teacher_slots: of a teacher's forward through a rank's layers.
    """
    num_stages = 1 + max(action.stage for actions in order for action in actions)
    unit = Fraction(len(order), num_stages)  # a stage is that part of a rank's layers
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
    """When all that ``action`` needs was done; None while it is not."""
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
    """Idle slots of all ranks from the first start to the last stop, and their share of all slots."""
    length = max(of_rank[-1].stop for of_rank in spans)
    busy = sum(span.stop - span.start for of_rank in spans for span in of_rank)
    return length * len(spans) - busy, 1 - busy / (length * len(spans))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a markdown table, and draws two timelines if asked to.

    Args:
        arguments: of the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--num_groups", type=int, nargs="+", default=[4])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument(
        "--plot", help="file for the timelines of 1F1B at the second number of ranks"
    )
    parser.add_argument(
        "--teacher",
        type=int,
        nargs="*",
        metavar="SLOTS",
        help="with a teacher before it, whose forward takes so many slots: 1 and 6, if not said",
    )
    args = parser.parse_args(arguments)
    if args.teacher is not None:
        print_with_teacher(args.num_ranks, args.num_groups, args.schedules, args.teacher or [1, 6])
        return

    print(
        "| ranks p | microbatches m | schedule | idle slots: groups of p | whole step | idle share: groups "
        "| whole step | (p - 1) / (m + p - 1) | whole step is faster by |"
    )
    print("| --- " * 9 + "|")
    for p in args.num_ranks:
        for num_groups in args.num_groups:
            m = p * num_groups
            for schedule in args.schedules:
                idle, share = idle_fraction(timeline(order_of_ranks(schedule, p, p)))
                whole_idle, whole_share = idle_fraction(timeline(order_of_ranks(schedule, p, m)))
                print(
                    f"| {p} | {m} | {schedule} | {float(idle * num_groups):g} | {float(whole_idle):g} | "
                    f"{float(share):.1%} | {float(whole_share):.1%} | {(p - 1) / (m + p - 1):.1%} | "
                    f"{float((1 - whole_share) / (1 - share)):.2f} |"
                )
    if args.plot:
        draw(args.plot, args.num_ranks[min(1, len(args.num_ranks) - 1)], args.num_groups[0])


def print_with_teacher(
    num_ranks: Sequence[int],
    num_groups: Sequence[int],
    schedules: Sequence[str],
    teacher_slots: Sequence[int],
) -> None:
    """Prints a markdown table for each number of ranks, groups of an update step, schedule and teacher."""
    print(
        "| ranks p | microbatches m | schedule | teacher's forward [slots] | idle share: groups of p "
        "| whole step | whole step is faster by |"
    )
    print("| --- " * 7 + "|")
    for p, groups, schedule, slots in itertools.product(
        num_ranks, num_groups, schedules, teacher_slots
    ):
        share, whole_share = (
            idle_fraction(timeline(order_after_teacher(schedule, p, m), slots))[1]
            for m in (p, p * groups)
        )
        print(
            f"| {p} | {p * groups} | {schedule} | {slots} | {float(share):.1%} | "
            f"{float(whole_share):.1%} | {float((1 - whole_share) / (1 - share)):.2f} |"
        )


def draw(path: str, num_ranks: int, num_groups: int) -> None:
    """Draws 1F1B in groups of ``num_ranks`` microbatches above 1F1B of the whole update step."""
    import matplotlib.pyplot as plt

    group = timeline(order_of_ranks("1F1B", num_ranks, num_ranks))
    length = max(of_rank[-1].stop for of_rank in group)
    in_groups = [
        [
            Span(action, start + length * g, stop + length * g)
            for g in range(num_groups)
            for action, start, stop in of_rank
        ]
        for of_rank in group
    ]
    whole = timeline(order_of_ranks("1F1B", num_ranks, num_ranks * num_groups))
    figure, panels = plt.subplots(2, 1, sharex=True, figsize=(10, 3.6), layout="constrained")
    for panel, spans, title in zip(
        panels,
        (in_groups, whole),
        (f"{num_groups} accumulation groups, one schedule each", "one schedule per update step"),
        strict=True,
    ):
        for rank, of_rank in enumerate(spans):
            for action, start, stop in of_rank:
                color = "#4477aa" if action.kind == "F" else "#cc8844"
                width = float(stop - start)
                panel.barh(
                    rank, width, left=float(start), color=color, edgecolor="white", height=0.9
                )
        _, share = idle_fraction(spans)
        panel.set_title(f"{title}: {float(share):.0%} idle", loc="left", fontsize=10)
        panel.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
        panel.invert_yaxis()
        panel.spines[:].set_visible(False)
    panels[-1].set_xlabel("slots (forwards blue, backwards orange)")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
