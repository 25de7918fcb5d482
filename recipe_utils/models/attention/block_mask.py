"""Flex attention's block mask from the lengths of documents, without a mask of all pairs of positions.

Example: documents of 200 and 184 tokens are a row of three blocks of 128. Keys of block 0 all end at 200, those of
block 1 at 200 or 384. Block 2 of queries begins at 256: it attends to no key of block 0 (200 <= 256), and to some of
block 1 (384 > 256, but 200 < 384, the end of block 2). So 5 of 9 blocks are computed, each with the mask of its pairs:

    queries    keys 0    keys 1    keys 2
    0          some
    1          some      some
    2                    some      some

Shapes: b rows, s positions per row, n blocks of :data:`BLOCK` positions in s.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from recipe_utils.text.documents import Documents

BLOCK = 128
"""Positions per block, of queries and of keys: flex attention's default."""


def sees(documents: Documents, window: int | None = None) -> Callable[..., Tensor]:
    """Returns flex attention's ``mask_mod``.

    A query attends to keys up to its position in its segment and in that one's ancestors. With a
    ``window`` [positions] only to the last ones of the row, its position included; without trees.
    """
    ends = documents.last_queries()

    def is_seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends[b, k])

    if window is None:
        return is_seen
    return lambda b, h, q, k: is_seen(b, h, q, k) & (q - k < window)


def dense_mask(documents: Documents) -> Tensor:
    """Returns the mask of all pairs of positions [b, s, s], on the documents' device."""
    num_rows, row_length = documents.shape
    device = documents.cu_seqlens.device
    positions = torch.arange(row_length, device=device)
    rows = torch.arange(num_rows, device=device)[:, None, None]
    return sees(documents)(rows, rows, positions[:, None], positions)


def block_mask(documents: Documents, window: int | None = None) -> BlockMask:
    """Returns a microbatch's mask on the documents' device, equal to ``create_block_mask`` of :func:`sees`.

    ``create_block_mask`` computes all [s, s] pairs, several times 4.3 GB for 65536 positions. The
    least and the greatest end of a block of keys tell which later blocks of queries see all or some of
    it: O(n^2) numbers, without a device synchronization.
    """
    # The least and the greatest end of each block of keys; padded keys do not count.
    _, row_length = documents.shape
    ends, padding = documents.last_queries(), -row_length % BLOCK
    first, last = (F.pad(ends, (0, padding), value=fill).unflatten(1, (-1, BLOCK)) for fill in (row_length, 0))
    first, last = first.amin(2)[:, None, :], last.amax(2)[:, None, :]  # [b, 1, key block]

    # Earlier blocks of keys: seen if one of them ends after the block of queries begins, by all if none ends in it.
    index = torch.arange(first.size(2), device=first.device)
    begin = index[:, None] * BLOCK
    is_before = index < index[:, None]  # [query block, key block]
    is_whole = (index < row_length // BLOCK)[:, None]  # False for a partial last block
    is_seen = is_before & (last > begin)  # if any query sees a key, the block's first one does
    is_seen_by_all = is_before & is_whole & (first >= begin + BLOCK)
    if window is not None:
        distance = index[:, None] - index  # in blocks; of positions one block more or less
        is_seen &= (distance - 1) * BLOCK + 1 < window
        is_seen_by_all &= (distance + 1) * BLOCK - 1 < window

    # On the diagonal each position attends to itself and not to later ones.
    is_partial = (is_seen & ~is_seen_by_all) | (index == index[:, None])
    return BlockMask.from_kv_blocks(
        *_in_order(is_partial[:, None]),
        *_in_order(is_seen_by_all[:, None]),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees(documents, window),
        seq_lengths=(row_length, row_length),
    )


def _in_order(is_block: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of True blocks [b, 1, n] per row of blocks, and block indices with those first."""
    numbers = is_block.to(torch.int32)
    indices = torch.argsort(numbers, dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32), indices.to(torch.int32)
