"""Plans: assignments of an update step's samples to microbatches and ranks.

A plan is a pure function of lengths and limits. The loss is normalized over the whole update step,
so a plan changes the cost of the gradient and not the gradient. Every rank computes the plan of all
ranks, so arithmetic is elementwise or in Python's order: no sum may depend on the machine.

A *round* is one microbatch on every rank; FSDP's ranks run rounds in lockstep. Plans that regroup
samples sort them, longest first, and give each round's costliest microbatch to the rank with the
least cost so far. The plan ``[[[0, 3], [2]], [[1]]]`` has two rounds: in the first, rank 0 computes
samples 0 and 3 and rank 1 sample 1; in the second, rank 0 computes sample 2 and rank 1 a dummy microbatch.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Microbatches = list[list[int]]
"""Microbatches of one rank: for each of them the positions of its samples, an empty list in a round without
samples. Ranks with the same positions in a round compute one row together."""

Plan = Callable[[Sequence[int], int], list[Microbatches]]
"""Lengths of samples [tokens], number of ranks -> microbatches of each rank."""


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Returns positions by descending length; equal lengths stay in order."""
    return sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))


class Share(NamedTuple):
    """Tokens of a row that one rank computes: ``first``, ``first + num_ranks``, ..."""

    first: int = 0
    num_ranks: int = 1
    """Ranks that compute the row together."""


WHOLE = Share()


def share_of(planned: Sequence[Microbatches], rank: int, index: int) -> Share:
    """Returns a rank's share of its microbatch ``index``."""
    row = planned[rank][index]
    ranks = [r for r, microbatches in enumerate(planned) if row and microbatches[index : index + 1] == [row]]
    return Share(ranks.index(rank), len(ranks)) if row else WHOLE
