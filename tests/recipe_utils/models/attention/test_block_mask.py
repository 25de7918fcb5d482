"""A block mask from lengths equals the one that PyTorch makes of all pairs of positions."""

import random

import pytest
import torch
from forests import some_tree
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torchtune.modules.attention_utils import create_block_causal_mask

from recipe_utils.models.attention.block_mask import block_mask, dense_mask, sees
from recipe_utils.text.documents import Documents, length_of, tree

SIZES = [1, 2, 5, 64, 127, 128, 129, 255, 256, 257, 300, 2048]
TENSORS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def some_documents(row_length, with_trees, draw):
    """Documents of all sizes, the last of which is padding, that fill a row."""
    row = []
    while (left := row_length - sum(map(length_of, row))) > 0:
        size = min(draw.choice(SIZES), left)
        row.append(some_tree(size, draw) if with_trees and draw.random() < 0.7 else size)
    return row


def assert_is_mask_of_all_pairs(rows, window=None):
    documents, size = Documents(rows), sum(map(length_of, rows[0]))
    ours = block_mask(documents, window)
    expected = create_block_mask(sees(documents, window), len(rows), None, size, size, "cpu")
    for name in TENSORS:
        mine, theirs = getattr(ours, name), getattr(expected, name)
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), name
    for name in ("seq_lengths", "BLOCK_SIZE", "shape"):
        assert getattr(ours, name) == getattr(expected, name)
    return ours


@pytest.mark.parametrize("with_trees", [False, True], ids=["plain", "trees"])
def test_it_is_the_mask_of_all_pairs_in_eighty_rows(with_trees):
    draw = random.Random(0)
    kinds = {"partial": 0, "full": 0}
    for index in range(40):
        row_length = draw.choice([128, 384, 640, 1000, 1024, 2048, 2049, 3000])
        rows = [some_documents(row_length, with_trees, draw) for _ in range(1 if index % 4 else 3)]
        mask = assert_is_mask_of_all_pairs(rows)
        kinds["partial"] += int(mask.kv_num_blocks.sum())
        kinds["full"] += int(mask.full_kv_num_blocks.sum())
    assert min(kinds.values()) > 100


PLAIN = [[4096], [2048, 2048], [127, 1, 128, 129, 2048, 15], [1] * 256]
SIZES_OF_PAIRS = [(200, 300, 12), (128, 128, 128), (1, 1, 1), (100, 1, 500), (384, 129, 127)]
PAIRS = [tree(*sizes) for sizes in SIZES_OF_PAIRS]


@pytest.mark.parametrize("row", [*PLAIN, *(row for pair in PAIRS for row in ([pair], [7, pair, 121], [pair, pair]))])
def test_documents_of_chosen_lengths_have_the_mask_of_all_pairs(row):
    assert_is_mask_of_all_pairs([row])


@pytest.mark.parametrize("row", PLAIN)
@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 130, 255, 256, 257, 600, 5000])
def test_windows_have_the_mask_of_all_pairs(row, window):
    assert_is_mask_of_all_pairs([row], window)
    positions = torch.arange(sum(row))
    rows = torch.zeros((), dtype=torch.long)
    seen = sees(Documents([row]), window)(rows, rows, positions[:, None], positions)
    ends = torch.tensor(row).cumsum(0)
    starts = (ends - torch.tensor(row))[torch.searchsorted(ends, positions, right=True)]
    assert torch.equal(seen.sum(1), (positions - starts + 1).clamp(max=window))


def test_a_dense_mask_is_torchtune_s():
    rows = [[3, 9, 1], [7, 6], [13]]
    assert torch.equal(dense_mask(Documents(rows)), create_block_causal_mask([torch.tensor(row) for row in rows]))


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *[leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]])
        return made


@pytest.mark.parametrize("row", [[2048] * 64, [tree(1024, 512, 512)] * 64], ids=["one", "two"])
def test_it_is_made_without_a_number_from_the_device_and_without_all_pairs(row):
    """It runs on the meta device, where reading a number raises, with 131072 positions (17 billion pairs)."""
    documents = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), Documents([row]))
    with Largest() as largest:
        mask = block_mask(documents)
    assert mask.kv_indices.is_meta
    # Blocks of queries times those of keys; PyTorch's transposition adds a column.
    assert largest.numel <= 1024 * 1025
