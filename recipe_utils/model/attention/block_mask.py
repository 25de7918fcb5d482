"""Flex attention's block mask from the lengths of documents, without a mask of all pairs of positions.

Shapes: b rows, s positions per row, n blocks of :data:`BLOCK` positions in s.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from recipe_utils.data.text.documents import Documents

BLOCK = 128
"""Positions per block, of queries and of keys: flex attention's default."""


def sees(documents: Documents, window: int | None = None) -> Callable[..., Tensor]:
    """Returns flex attention's ``mask_mod``.

    A query attends to keys up to its own position in its own document, of the shared prefix or of
    its own answer. With a ``window`` [positions] only to the last ones, its own included; there are
    no prefix-shared pairs then.
    """
    document_of, branch_of = documents.of_positions()

    def of_plain(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (document_of[b, k] == document_of[b, q])

    if window is not None:
        return lambda b, h, q, k: of_plain(b, h, q, k) & (q - k < window)
    if branch_of is None:
        return of_plain
    branches = branch_of

    def of_prefix_shared(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return of_plain(b, h, q, k) & ((branches[b, k] == 0) | (branches[b, k] == branches[b, q]))

    return of_prefix_shared


def dense_mask(documents: Documents) -> Tensor:
    """Returns the mask of all pairs of positions [b, s, s], on the documents' device."""
    num_rows, row_length = documents.shape
    device = documents.boundaries.device
    positions = torch.arange(row_length, device=device)
    rows = torch.arange(num_rows, device=device)[:, None, None]
    return sees(documents)(rows, rows, positions[:, None], positions)


def block_mask(documents: Documents, window: int | None = None) -> BlockMask:
    """Returns a microbatch's mask on the documents' device, equal to ``create_block_mask`` of :func:`sees`.

    ``create_block_mask`` computes all [s, s] pairs, several times 4.3 GB for 65536 positions.
    Documents increase along a row and branches within a document, so first and last position determine
    a block: O(n^2) numbers, without a device synchronization.
    """
    _, row_length = documents.shape
    document_of, branch_of = documents.of_positions()
    first, last = _at_blocks(document_of)
    num_blocks = first.size(1)
    index = torch.arange(num_blocks, device=first.device)
    is_before = index < index[:, None]  # [query block, key block]
    is_whole = (index < row_length // BLOCK)[:, None]  # False for a partial last block

    # [b, query block, key block]. An earlier block contains a query's document iff that is its last document.
    is_seen = is_before & (first[:, :, None] == last[:, None, :])
    is_seen_by_all = is_before & is_whole & (last[:, :, None] == first[:, None, :])
    if branch_of is not None:
        first_branch, last_branch = _at_blocks(branch_of)
        # If a block's last document begins in it, its first position of that document is a shared one.
        first_of_last = torch.where(first == last, first_branch, 0)[:, None, :]
        of_keys = last_branch[:, None, :]
        of_query = first_branch[:, :, None]
        is_seen &= (first_of_last == 0) | (of_keys == of_query)
        # Keys are all shared, or all of the one answer of all queries, with none of the other answer between them.
        is_plain = (first_of_last == of_keys) | ((first_of_last == 0) & (of_keys == 1))
        is_own = (of_query == last_branch[:, :, None]) & (of_query == of_keys) & is_plain
        is_seen_by_all &= (of_keys == 0) | is_own
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


def _at_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values [b, s] at the first and last position of each block, [b, n] each."""
    last = values[:, BLOCK - 1 :: BLOCK]
    if values.size(1) % BLOCK:
        last = torch.cat([last, values[:, -1:]], dim=1)
    return values[:, ::BLOCK], last


def _in_order(is_block: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of True blocks [b, 1, n] per row of blocks, and block indices with those first."""
    numbers = is_block.to(torch.int32)
    indices = torch.argsort(numbers, dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32), indices.to(torch.int32)
