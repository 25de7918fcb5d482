"""Moves samples between the data-parallel ranks, before an update step is planned.

All in the background thread and over its CPU group. Every rank computes the same deal from the
same lengths, so what goes where needs no further word.
"""

import pickle
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from recipe_utils.count import check_all_ready, gather_rows, wait_unless_closed
from recipe_utils.samples import Sample

Deal = Callable[[Sequence[int]], list[list[int]]]
"""Lengths of an update step's samples, rank after rank -> their positions for each rank."""


def exchange_samples(
    samples: Sequence[Sample] | None,
    deal: Deal,
    max_samples: int,
    dp_peers: Sequence[int],
    group: dist.ProcessGroup | None,
    closed: threading.Event,
) -> list[Sample]:
    """Deals the samples of one update step to the ranks and sends each where it belongs.

    Every rank of ``group`` must call it once per update step, in step order: one sum of a small
    table of lengths and, unless every sample stays where it is, two all-to-alls of bytes.

    Args:
        samples: this rank's; None says that it could not load them.
        deal: pure and deterministic.
        max_samples: the most samples a rank has.
        dp_peers: the ranks of ``group`` among which samples move, by data-parallel coordinate; with
            tensor parallelism those of the same coordinate in their group.
        group: a CPU (gloo) group of all ranks that nothing else uses.
        closed: once set, the other ranks are no longer waited for.

    Returns:
        The samples dealt to this rank; nothing where it passed None.

    Raises:
        recipe_utils.count.OtherRankFailedError: another rank passed None.
        recipe_utils.count.AbandonedError: ``closed`` was set first.
    """
    # A row per rank: its number of samples plus one, so that 0 says it failed, and their lengths.
    own: list[int] = []
    if samples is not None:
        own = [len(samples) + 1, *(len(sample["tokens"]) for sample in samples)]
    table = gather_rows(own, 1 + max_samples, group, closed)
    if samples is None:
        return []
    check_all_ready(table[:, 0])

    rows = [table[peer].tolist() for peer in dp_peers]
    num_samples = [row[0] - 1 for row in rows]
    lengths = [length for row in rows for length in row[1 : row[0]]]
    owner = [source for source, number in enumerate(num_samples) for _ in range(number)]
    dealt = deal(lengths)
    if all(owner[position] == to for to, positions in enumerate(dealt) for position in positions):
        return list(samples)

    me = list(dp_peers).index(dist.get_rank(group))
    first = sum(num_samples[:me])
    outgoing = [b""] * len(table)
    for to, positions in enumerate(dealt):
        leaving = [samples[p - first] for p in positions if owner[p] == me and to != me]
        if leaving:
            outgoing[dp_peers[to]] = pickle.dumps(leaving)
    incoming = _all_to_all(outgoing, group, closed)

    mine = []
    arrived = [iter(pickle.loads(incoming[peer]) if incoming[peer] else ()) for peer in dp_peers]
    for position in dealt[me]:
        source = owner[position]
        mine.append(samples[position - first] if source == me else next(arrived[source]))
    return mine


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
