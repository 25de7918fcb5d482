"""Update steps cut one seeded order: the stock one, each sample once, whatever the ranks."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from recipe_utils.data.loader.sampler import (
    StepIndex,
    epoch_permutation,
    num_update_steps,
    update_step_indices,
)

SIZES_AND_RANKS = list(itertools.product([1, 7, 16, 19], [1, 3, 8]))


@pytest.mark.parametrize(
    ("sampler_class", "shuffle", "epoch"),
    [
        (DistributedSampler, True, 5),
        (DistributedSampler, False, 0),
        (StatefulDistributedSampler, True, 0),
    ],
)
def test_each_rank_visits_the_samples_in_the_order_of_the_stock_samplers(
    sampler_class, shuffle, epoch
):
    num_samples, dp_degree, global_batch_size = 48, 4, 12
    permutation = epoch_permutation(num_samples, epoch, shuffle)
    for rank in range(dp_degree):
        stock = sampler_class(
            range(num_samples), num_replicas=dp_degree, rank=rank, shuffle=shuffle, seed=0
        )
        stock.set_epoch(epoch)
        ours = [
            index
            for step in range(num_samples // global_batch_size)
            for index in update_step_indices(permutation, step, global_batch_size, rank, dp_degree)
        ]
        assert ours == list(stock)


def test_epochs_and_seeds_differ_in_their_order():
    orders = [
        tuple(epoch_permutation(50, epoch, shuffle=True, seed=seed).tolist())
        for epoch, seed in [(0, 0), (1, 0), (0, 100)]
    ]
    assert len(set(orders)) == 3


@pytest.mark.parametrize(("num_samples", "dp_degree"), SIZES_AND_RANKS)
def test_the_ranks_shares_of_an_epoch_hold_every_sample_once(num_samples, dp_degree):
    for samples_per_rank in (1, 3):
        global_batch_size = samples_per_rank * dp_degree
        permutation = epoch_permutation(num_samples, epoch=1, shuffle=True)
        visited = [
            index
            for step in range(num_update_steps(num_samples, global_batch_size, "train"))
            for rank in range(dp_degree)
            for index in update_step_indices(permutation, step, global_batch_size, rank, dp_degree)
        ]
        assert sorted(visited) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [5, 24, 31])
def test_the_samples_of_an_update_step_do_not_depend_on_the_number_of_ranks(num_samples):
    permutation = epoch_permutation(num_samples, epoch=0, shuffle=True)

    def samples_of_each_step(dp_degree):
        return [
            sorted(
                index
                for rank in range(dp_degree)
                for index in update_step_indices(permutation, step, 12, rank, dp_degree)
            )
            for step in range(num_update_steps(num_samples, 12, "train"))
        ]

    for dp_degree in (2, 3, 4, 6, 12):
        assert samples_of_each_step(dp_degree) == samples_of_each_step(1)


def test_ranks_differ_by_at_most_one_sample_in_the_short_last_update_step():
    permutation = epoch_permutation(19, epoch=0, shuffle=True)
    shares = [len(update_step_indices(permutation, 1, 16, rank, 4)) for rank in range(4)]
    assert sum(shares) == 3
    assert max(shares) - min(shares) == 1


@pytest.mark.parametrize("num_samples", [8, 15, 16, 17])
def test_drop_counts_full_update_steps_and_train_the_short_one_too(num_samples):
    windows = [range(num_samples)[start : start + 8] for start in range(0, num_samples, 8)]
    assert num_update_steps(num_samples, 8, "train") == len(windows)
    assert num_update_steps(num_samples, 8, "drop") == sum(len(w) == 8 for w in windows)


def test_max_steps_per_epoch_is_an_upper_bound():
    assert num_update_steps(17, 8, "train", max_steps_per_epoch=2) == 2
    assert num_update_steps(17, 8, "train", max_steps_per_epoch=9) == 3


def test_an_epoch_without_update_steps_is_refused():
    with pytest.raises(ValueError, match="7 samples do not fill one update step of 8"):
        num_update_steps(7, 8, "drop")


# ---- Blocks, and the place of an index in the training ---------------------------------------------


@pytest.mark.parametrize("dp_degree", [1, 2, 4])
@pytest.mark.parametrize(("num_samples", "block"), [(37, 16), (64, 16), (128, 2), (3, 4)])
def test_blocks_of_an_update_step_are_whole_on_a_rank_and_the_same_on_any_number(
    num_samples, block, dp_degree
):
    permutation = epoch_permutation(num_samples, epoch=2, shuffle=True)
    shares = [
        update_step_indices(permutation, 0, 64, rank, dp_degree, block=block)
        for rank in range(dp_degree)
    ]
    window = permutation[:64].tolist()
    assert sorted(itertools.chain(*shares)) == sorted(window)
    for share in shares:
        positions = [index.position for index in share]
        assert [window[position] for position in positions] == share
        blocks = [
            list(of_block)
            for _, of_block in itertools.groupby(positions, lambda position: position // block)
        ]
        for of_block in blocks:
            first = of_block[0]
            assert first % block == 0
            assert of_block == list(range(first, min(first + block, len(window))))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= block


def test_an_index_knows_its_place_and_is_the_same_on_any_number_of_ranks():
    permutation = epoch_permutation(37, epoch=3, shuffle=True)

    def places(dp_degree):
        return {
            (int(index), index.epoch, index.step, index.position, index.step_size)
            for step in range(3)
            for rank in range(dp_degree)
            for index in update_step_indices(permutation, step, 16, rank, dp_degree, epoch=3)
        }

    order = permutation.tolist()
    expected = {(order[i], 3, i // 16, i % 16, 16 if i < 32 else 5) for i in range(37)}
    assert places(1) == places(2) == places(4) == expected


def test_an_index_is_an_int_to_everything_else():
    index = StepIndex(5, epoch=1, step=2, position=3, step_size=4)
    assert (index, hash(index), str(index), f"{index}", repr(index)) == (5, hash(5), "5", "5", "5")
    assert "abcdefg"[index] == "f"
    assert torch.arange(9)[index] == 5
    assert type(index - 1) is int
    assert isinstance(index, int)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda i: pickle.loads(pickle.dumps(i))]
)
def test_an_index_comes_to_a_worker_with_its_place(copied):
    index = copied(StepIndex(5, epoch=1, step=2, position=3, step_size=4))
    assert type(index) is StepIndex
    assert (index, index.epoch, index.step, index.position, index.step_size) == (5, 1, 2, 3, 4)


def test_a_plain_int_is_the_only_sample_of_the_first_update_step():
    index = StepIndex.of(5)
    assert (index, index.epoch, index.step, index.position, index.step_size) == (5, 0, 0, 0, 1)
    assert StepIndex.of(placed := StepIndex(5, 1)) is placed
