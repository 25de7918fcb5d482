"""Sizes and shapes of masks, and the factor of an update step's positions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe_utils.dinov3.images.view_draws import block_mask, mask_ratios, position_factor


@given(side=st.integers(1, 14), share=st.floats(0, 1), seed=st.integers(0, 999))
def test_a_mask_has_exactly_the_given_number_of_patches(side, share, seed):
    num_masked = round(share * side**2)
    mask = block_mask(side, num_masked, torch.Generator().manual_seed(seed))
    assert mask.shape == (side**2,)
    assert mask.sum() == num_masked


def test_masks_are_blocks():
    def share_of_equal_neighbors(mask):
        square = mask.reshape(14, 14)
        return (square[:, 1:] == square[:, :-1]).mean()

    of_blocks, scattered = [], []
    for seed in range(50):
        mask = block_mask(14, 60, torch.Generator().manual_seed(seed))
        of_blocks.append(share_of_equal_neighbors(mask))
        scattered.append(share_of_equal_neighbors(np.random.default_rng(seed).permutation(mask)))
    assert np.mean(of_blocks) > 0.8
    assert np.mean(scattered) < 0.62


@pytest.mark.parametrize(("num_crops", "probability"), [(128, 0.5), (10, 0.3), (2, 0.5)])
def test_mask_ratios_of_an_update_step_are_spread_evenly(num_crops, probability):
    ratios = mask_ratios(0, 1, 2, num_crops, probability, (0.1, 0.5))
    masked = np.sort(ratios[ratios > 0])
    number = round(probability * num_crops)
    assert len(masked) == number
    edges = np.linspace(0.1, 0.5, number + 1)
    assert (masked >= edges[:-1]).all()
    assert (masked <= edges[1:]).all()
    for place in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        other = mask_ratios(*place, num_crops, probability, (0.1, 0.5))
        assert not np.array_equal(ratios, other)


def test_the_factor_of_positions_is_log_uniform_in_its_range():
    factors = np.array([position_factor(0, 0, step, 2.0) for step in range(400)])
    assert 0.5 <= factors.min() < 0.51
    assert 1.95 < factors.max() <= 2
    assert abs(np.log2(factors).mean()) < 0.1
    assert position_factor(0, 0, 0, None) == position_factor(0, 0, 0, 1.0) == 1
