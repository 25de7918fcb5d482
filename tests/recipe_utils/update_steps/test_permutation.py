"""Orders that are computed by index are permutations, the same on every machine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe_utils.update_steps.permutation import NUM_IN_MEMORY, LazyPermutation, epoch_permutation, mixed, seed_of

SIZES = [*range(1, 301), *(2**k + d for k in range(9, 15) for d in (-1, 0, 1))]


def test_every_index_is_there_once():
    for num in SIZES:
        order = LazyPermutation(num, seed=num)
        assert sorted(order[:].tolist()) == list(range(num)) == LazyPermutation(num, None)[:].tolist()


@given(st.integers(1, 2**40), st.integers(0, 2**63), st.data())
def test_a_part_is_computed_as_in_the_whole(num, seed, data):
    order = LazyPermutation(num, seed)
    start = data.draw(st.integers(0, num - 1))
    part = order[start : start + 20]
    assert part.dtype == np.int64
    assert len(part) == len(set(part.tolist())) == min(20, num - start)
    assert 0 <= part.min() <= part.max() < num
    assert part.tolist() == [order[i : i + 1].item() for i in range(start, start + len(part))]


STORED = {
    (10, 0): [9, 1, 7, 2, 5],
    (300, 1): [74, 54, 247, 290, 239],
    (2**24 + 1, 0): [11853422, 4378288, 5731813, 2932439, 9580922],
    (5 * 10**9, 7): [4818003999, 193121015, 3772855921, 3905813590, 2855824639],
    (10**12, 2**32): [950117011149, 582455797715, 886232054775, 695436923439, 602050192899],
}


@pytest.mark.parametrize("given", STORED, ids=str)
def test_an_order_never_changes(given):
    """Checkpoints of larger datasets depend on it. The last line is splitmix64's first output for seed 0."""
    assert LazyPermutation(*given)[3:8].tolist() == STORED[given]
    assert mixed(np.array([0x9E3779B97F4A7C15], np.uint64))[0] == 0xE220A8397B1DCDAF


def test_places_are_uniform():
    """Counts of 60 epochs over 32 x 32 places and ranges of indices."""
    num, cells = 4096, np.zeros((32, 32))
    for seed in range(60):
        order = LazyPermutation(num, seed)[:]
        np.add.at(cells, (np.arange(num) * 32 // num, order * 32 // num), 1)
    expected = 60 * num / 32**2
    assert 0.8 < ((cells - expected) ** 2).sum() / expected / 31**2 < 1.25


def test_only_large_datasets_have_such_an_order_with_another_one_in_each_epoch():
    assert not isinstance(epoch_permutation(NUM_IN_MEMORY, 0, shuffle=False), LazyPermutation)
    first, second = (epoch_permutation(2**40, epoch, shuffle=True, seed=3) for epoch in (0, 1))
    assert set(first[:100].tolist()).isdisjoint(second[:100].tolist())
    assert epoch_permutation(2**40, 0, shuffle=False)[7:9].tolist() == [7, 8]
    assert seed_of(1, 2) != seed_of(2, 1)
