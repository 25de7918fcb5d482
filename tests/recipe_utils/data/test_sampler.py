"""Update steps cut one seeded order: the stock one, each sample once, whatever the ranks."""

import itertools

import pytest
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from recipe_utils.data.sampler import epoch_permutation, num_update_steps, update_step_indices

SIZES_AND_RANKS = list(itertools.product([1, 2, 3, 7, 16, 19, 48], [1, 2, 3, 4, 8]))


@pytest.mark.parametrize("sampler_class", [DistributedSampler, StatefulDistributedSampler])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epoch", [0, 5])
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 8, "drop"), "7 samples do not fill one update step of 8"),
        ((7, 8, "keep"), "last_update_step=keep"),
    ],
)
def test_an_epoch_without_update_steps_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        num_update_steps(*arguments)
