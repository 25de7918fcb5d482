"""How well a frozen backbone's states tell classes apart: by the votes of nearest neighbours, over all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def num_voted_right(
    states: Tensor,
    labels: Tensor,
    bank: Tensor,
    bank_labels: Tensor,
    num_neighbors: int = 20,
    temperature: float = 0.07,
    rows_per_chunk: int = 1024,
) -> Tensor:
    """Of how many images the nearest neighbours vote for their label, [].

    Each neighbour's vote weighs exp(cosine / temperature) (Wu et al., arXiv:1805.01978, section 3.4; k of 20
    as in DINO, arXiv:2104.14294).

    Args:
        states: of the images, [n, d].
        labels: theirs, [n], from 0.
        bank: states of images whose labels are known, [m, d].
        bank_labels: theirs, [m].
        num_neighbors: at most m.
        temperature: of the votes.
        rows_per_chunk: compared with the bank at once.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    bank, states = (F.normalize(each.to(wide), dim=-1) for each in (bank, states))
    num_classes = int(torch.cat([bank_labels, labels]).max()) + 1 if len(labels) else 1
    num_right = torch.zeros((), dtype=torch.int64, device=states.device)
    for rows in range(0, len(states), rows_per_chunk):
        chunk = slice(rows, rows + rows_per_chunk)
        cosines, nearest = (states[chunk] @ bank.t()).topk(num_neighbors, dim=1)
        votes = cosines.new_zeros(len(cosines), num_classes)
        votes.scatter_add_(1, bank_labels[nearest], (cosines / temperature).exp())
        num_right += (votes.argmax(1) == labels[chunk]).sum()
    return num_right


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows [n, ...] of all ranks of a group one after the other; n may differ. Waits for the device.

    Args:
        rows: of this rank.
        group: None for this rank alone.
    """
    if group is None:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device), group=group)
    num_rows = [int(count) for count in counts]
    padded = rows.new_zeros(max(num_rows), *rows.shape[1:])
    padded[: len(rows)] = rows
    of_ranks = [torch.empty_like(padded) for _ in num_rows]
    dist.all_gather(of_ranks, padded, group=group)
    return torch.cat([each[:num] for each, num in zip(of_ranks, num_rows, strict=True)])
