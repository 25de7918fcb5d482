"""Neighbors equal those of a plain loop over images, on one rank and on several."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from recipe_utils.dinov3.nearest_neighbors import NearestNeighbors, num_voted_right
from recipe_utils.update_steps.samples import SampleError
from recipe_utils.update_steps.step import UpdateStep


def drawn(num, seed, num_classes=4, dim=6):
    """States around the mean of their class, far enough from it that some are wrong."""
    generator = torch.Generator().manual_seed(seed)
    middles = torch.randn(num_classes, dim, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(num_classes, (num,), generator=generator)
    return middles[labels] + 1.2 * torch.randn(num, dim, generator=generator), labels


def plain(states, labels, bank, bank_labels, num_neighbors, temperature):
    num_right = 0
    for state, label in zip(states, labels, strict=True):
        found = []
        for other, its_label in zip(bank, bank_labels, strict=True):
            cosine = torch.cosine_similarity(state.double(), other.double(), dim=0).item()
            found.append((cosine, int(its_label)))
        votes = {}
        for cosine, its_label in sorted(found, reverse=True)[:num_neighbors]:
            vote = torch.tensor(cosine / temperature, dtype=torch.float64).exp().item()
            votes[its_label] = votes.get(its_label, 0.0) + vote
        num_right += max(votes, key=votes.get) == int(label)
    return num_right


@pytest.mark.parametrize("temperature", [0.07, 1.0])
@pytest.mark.parametrize("num_neighbors", [1, 5, 30])
def test_votes_are_those_of_a_plain_loop(num_neighbors, temperature):
    states, labels = drawn(40, seed=0)
    bank, bank_labels = drawn(30, seed=1)
    expected = plain(states, labels, bank, bank_labels, num_neighbors, temperature)
    assert 8 < expected < 40
    for rows_per_chunk in (1, 7, 1024):
        found = num_voted_right(5 * states, labels, bank, bank_labels, num_neighbors, temperature, rows_per_chunk)
        assert found == expected


def test_unknown_classes_are_wrong_and_no_images_are_no_error():
    states, labels = drawn(5, seed=0)
    bank, bank_labels = drawn(9, seed=1)
    assert num_voted_right(states, labels + 100, bank, bank_labels, 3) == 0
    assert num_voted_right(bank[:0], bank_labels[:0], bank, bank_labels, 3) == 0


class Images(list):
    name = "dataset_knn"


def loader_of(num_images, num_skipped):
    """Returns one update step of a dataset with some corrupt images."""
    states, labels = drawn(num_images - num_skipped, seed=0)
    microbatch = SimpleNamespace(states=states, targets=SimpleNamespace(labels=labels))
    step = UpdateStep(0, (microbatch,), {"images": len(labels)}, dp_degree=1)
    return SimpleNamespace(dataset=Images(range(num_images)), epoch=lambda _: nullcontext([step]))


def test_too_few_images_that_can_be_used_are_named():
    ranks = SimpleNamespace(dp_degree=1, device=torch.device("cpu"), has_last_stage=True)
    neighbors = NearestNeighbors(loader_of(20, 9), loader_of(5, 0), 12, ranks)
    with pytest.raises(SampleError, match="knn_neighbors=12: only 11 of 20 images of dataset_knn"):
        neighbors.accuracy(lambda microbatches: {0: microbatches[0].states})
