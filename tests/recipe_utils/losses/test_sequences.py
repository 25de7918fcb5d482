"""Sums of sequences are those of their targets, in any order of the row."""

import pytest
import torch

from recipe_utils.losses.sequences import sums_of_sequences
from recipe_utils.update_steps.step import Targets


def targets_of(owners, num_sequences):
    """Returns targets at every second position of a row, the others of which belong to sequence 0."""
    row = torch.zeros(1, 2 * len(owners), dtype=torch.int64)
    row[0, ::2] = torch.tensor(owners)
    return Targets(row, torch.arange(0, row.numel(), 2), row, samples=torch.zeros(num_sequences))


def test_sums_and_their_gradients_are_those_of_each_sequence():
    owners, firsts = [1, 0, 2, 1, 1, 0, 3, 1], [1, 3, 0, 0, 0]
    of_targets = torch.randn(8, requires_grad=True)
    sums, numbers = sums_of_sequences(of_targets, targets_of(owners, 5), torch.tensor(firsts))
    of_sequences = [[of_targets[i].item() for i, owner in enumerate(owners) if owner == k] for k in range(5)]
    for found, values, first in zip(sums.tolist(), of_sequences, firsts, strict=True):
        assert found == pytest.approx([sum(values[:first]), sum(values[first:])], abs=1e-12)
    assert numbers.tolist() == [[1, 1], [3, 1], [0, 1], [0, 1], [0, 0]]
    (sums * torch.arange(10).view(5, 2)).sum().backward()
    assert of_targets.grad.tolist() == [2, 0, 5, 2, 2, 1, 7, 3]


def test_sums_of_many_small_numbers_lose_nothing():
    none = torch.zeros(2, dtype=torch.int64)
    sums, _ = sums_of_sequences(torch.full((100_001,), -0.1), targets_of([0] * 100_000 + [1], 2), none)
    assert sums[0].sum().item() == pytest.approx(-0.1 * 100_000, rel=1e-7)  # -0.1 in fp32 is 1.5e-8 off


def test_without_sequences_the_sums_are_empty_with_a_graph():
    none = torch.zeros(0, dtype=torch.int64)
    sums, _ = sums_of_sequences(torch.zeros(0, requires_grad=True), targets_of([], 0), none)
    assert sums.shape == (0, 2)
    assert sums.requires_grad
