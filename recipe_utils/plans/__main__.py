"""Draws the plan of an update step as SVG: ``python -m recipe_utils.plans LENGTH ... > plan.svg``.

``python -m recipe_utils.plans 5 3 9 2 --ranks 2`` draws four samples on two ranks. Each line is a row of a microbatch,
each square a token, with the number of its sample. As they come, rank 0 pads samples 0 and 2 to 2 rows of 9, and rank 1
samples 1 and 3 to 2 rows of 3: 24 positions, and rank 1 waits until rank 0 has computed 18. Packed, sample 2 stays on
rank 0, and sample 0 moves to rank 1: 19 positions, at most 10 on a rank.
"""

import argparse
from collections.abc import Sequence

from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.plans.packed import plan_packed
from recipe_utils.plans.padded import plan_in_order

COLORS = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#9c755f", "#e15759", "#76b7b2", "#edc948"]
PADDING = "#e4e4e4"
SQUARE = 18
"""Side of a token [px]."""

DrawnRow = list[int | None]
"""Sample of each position of a row, None for padding."""


def padded_rows(lengths: Sequence[int], num_ranks: int, batch_size: int) -> list[list[DrawnRow]]:
    """Returns the rows of each rank as the stock recipes make them: samples as they come, dealt to the ranks."""
    ranks: list[list[DrawnRow]] = []
    for rank in range(num_ranks):
        samples = range(rank, len(lengths), num_ranks)
        (plan,) = plan_in_order([lengths[sample] for sample in samples], batch_size=batch_size)
        microbatches = [[samples[position] for position in microbatch] for microbatch in plan]
        ranks.append([])
        for microbatch in microbatches:
            longest = max(lengths[sample] for sample in microbatch)
            ranks[-1] += [[sample] * lengths[sample] + [None] * (longest - lengths[sample]) for sample in microbatch]
    return ranks


def packed_rows(lengths: Sequence[int], num_ranks: int, batch_size: int) -> list[list[DrawnRow]]:
    """Returns the rows of each rank with ``microbatching: packed``."""
    plan = plan_packed(lengths, num_ranks, batch_size=batch_size, cost=MicrobatchCost())
    return [[[sample for sample in row for _ in range(lengths[sample])] for row in rows] for rows in plan]


def draw(lengths: Sequence[int], num_ranks: int, batch_size: int) -> str:
    """Returns an SVG of the samples [tokens] on ``num_ranks`` ranks: padded, and below it packed."""
    shapes: list[str] = []
    y = 0
    for title, make in (("in_order", padded_rows), ("packed", packed_rows)):
        ranks = make(lengths, num_ranks, batch_size)
        # A line of text with the numbers, then a line for each rank and one for each of its rows.
        loads = [sum(map(len, rows)) for rows in ranks]
        num_padded = sum(sample is None for rows in ranks for row in rows for sample in row)
        text = f"{title}: {sum(loads)} positions, {num_padded} of them padding; at most {max(loads)} on a rank"
        y += 24
        shapes.append(f'<text x="8" y="{y}" font-weight="bold">{text}</text>')
        y += 10
        for rank, rows in enumerate(ranks):
            shapes.append(f'<text x="8" y="{y + 14}">rank {rank}</text>')
            for row in rows or [[]]:
                for x, sample in enumerate(row, start=4):
                    color = PADDING if sample is None else COLORS[sample % len(COLORS)]
                    square = f'width="{SQUARE - 2}" height="{SQUARE - 2}" fill="{color}"'
                    shapes.append(f'<rect x="{x * SQUARE}" y="{y}" {square}/>')
                    if sample is not None:
                        number = f'x="{x * SQUARE + 8}" y="{y + 12}" fill="white" text-anchor="middle" font-size="11"'
                        shapes.append(f"<text {number}>{sample}</text>")
                y += SQUARE
            y += 6
    # The page is as wide as all samples in one row.
    width, height = max(SQUARE * (5 + sum(lengths)), 480), y + 6
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([f'{head} font-size="13">', background, *shapes, "</svg>"])


def main() -> None:
    """Prints the SVG of the lengths on the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipe_utils.plans", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("lengths", nargs="+", type=int, metavar="LENGTH", help="of each sample, in order [tokens]")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--batch_size", type=int, default=2, help="samples per padded microbatch (default 2)")
    arguments = parser.parse_args()
    if min(*arguments.lengths, arguments.ranks, arguments.batch_size) < 1:
        parser.error("lengths, --ranks and --batch_size must be at least 1")
    print(draw(arguments.lengths, arguments.ranks, arguments.batch_size))  # noqa: T201


if __name__ == "__main__":
    main()
