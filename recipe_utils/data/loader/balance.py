"""Moves samples between the data-parallel ranks, to where the plan of an update step wants them.

All in the background thread and over its CPU group. Every rank computes the same plan from the
same lengths, so what goes where needs no further word.
"""

import pickle
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from recipe_utils.data.loader.count import check_all_ready, gather_rows, wait_unless_closed
from recipe_utils.data.loader.plan import Plan
from recipe_utils.data.loader.samples import Sample

LengthOf = Callable[[Sample], int]
"""A sample's length [tokens]."""


def group_samples(samples: Sequence[Sample], length_of: LengthOf, plan: Plan) -> list[list[Sample]]:
    """The samples of each microbatch, planned for this rank alone."""
    (microbatches,) = plan([length_of(sample) for sample in samples], 1)
    return [[samples[position] for position in microbatch] for microbatch in microbatches]


def exchange_samples(
    samples: Sequence[Sample] | None,
    length_of: LengthOf,
    plan: Plan,
    max_samples: int,
    dp_peers: Sequence[int],
    group: dist.ProcessGroup | None,
    closed: threading.Event,
) -> list[list[Sample]]:
    """Plans one update step over all ranks and sends each sample where it belongs.

    Every rank of ``group`` must call it once per update step, in step order: one sum of a small
    table of lengths and, unless every sample stays where it is, two all-to-alls of bytes.

    Args:
        samples: this rank's; None says that it could not load them.
        length_of: what the plan knows of a sample.
        plan: pure and deterministic.
        max_samples: the most samples a rank has.
        dp_peers: the ranks of ``group`` among which samples move, by data-parallel coordinate; with
            tensor parallelism those of the same coordinate in their group.
        group: a CPU (gloo) group of all ranks that nothing else uses.
        closed: once set, the other ranks are no longer waited for.

    Returns:
        The samples of each of this rank's microbatches; nothing where it passed None.

    Raises:
        recipe_utils.data.loader.count.OtherRankFailedError: another rank passed None.
        recipe_utils.data.loader.count.AbandonedError: ``closed`` was set first.
    """
    # A row per rank: its number of samples plus one, so that 0 says it failed, and their lengths.
    own: list[int] = []
    if samples is not None:
        own = [len(samples) + 1, *map(length_of, samples)]
    table = gather_rows(own, 1 + max_samples, group, closed)
    if samples is None:
        return []
    check_all_ready(table[:, 0])

    rows = [table[peer].tolist() for peer in dp_peers]
    num_samples = [row[0] - 1 for row in rows]
    lengths = [length for row in rows for length in row[1 : row[0]]]
    owner = [source for source, number in enumerate(num_samples) for _ in range(number)]
    first_of = [sum(num_samples[:source]) for source in range(len(num_samples))]
    planned = plan(lengths, len(dp_peers))
    me = list(dp_peers).index(dist.get_rank(group))
    held = {first_of[me] + i: sample for i, sample in enumerate(samples)}

    moves = [
        [p for microbatch in microbatches for p in microbatch if owner[p] != to]
        for to, microbatches in enumerate(planned)
    ]
    if any(moves):
        outgoing = [b""] * len(table)
        for to, positions in enumerate(moves):
            leaving = {p: samples[p - first_of[me]] for p in positions if owner[p] == me}
            if leaving:
                outgoing[dp_peers[to]] = pickle.dumps(leaving)
        for part in _all_to_all(outgoing, group, closed):
            held.update(pickle.loads(part) if part else {})
    return [[held[p] for p in microbatch] for microbatch in planned[me]]


def _all_to_all(
    outgoing: Sequence[bytes], group: dist.ProcessGroup | None, closed: threading.Event
) -> list[bytes]:
    """Sends ``outgoing[r]`` to each rank r; returns what each rank sent here."""
    sizes = torch.tensor([len(part) for part in outgoing])
    incoming_sizes = torch.empty_like(sizes)
    work = dist.all_to_all_single(incoming_sizes, sizes, group=group, async_op=True)
    wait_unless_closed(work, closed)

    payload = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)
    received = torch.empty(int(incoming_sizes.sum()), dtype=torch.uint8)
    work = dist.all_to_all_single(
        received,
        payload[: int(sizes.sum())],
        output_split_sizes=incoming_sizes.tolist(),
        input_split_sizes=sizes.tolist(),
        group=group,
        async_op=True,
    )
    wait_unless_closed(work, closed)
    return [bytes(part.numpy()) for part in received.split(incoming_sizes.tolist())]
