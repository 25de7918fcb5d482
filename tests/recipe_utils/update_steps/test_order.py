"""Update steps are cut from one seeded order: the stock one, each sample once, on any number of ranks."""

import itertools

import pytest
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from recipe_utils.update_steps.order import OnRank, ShuffledOrder, num_done
from recipe_utils.update_steps.permutation import epoch_permutation


@pytest.mark.parametrize(
    ("sampler_class", "shuffle", "epoch"),
    [(DistributedSampler, True, 5), (DistributedSampler, False, 0), (StatefulDistributedSampler, True, 0)],
)
def test_each_rank_visits_the_samples_in_the_order_of_the_stock_samplers(sampler_class, shuffle, epoch):
    order = ShuffledOrder(48, 12, shuffle)
    for rank in range(4):
        stock = sampler_class(range(48), num_replicas=4, rank=rank, shuffle=shuffle, seed=0)
        stock.set_epoch(epoch)
        ours = OnRank(order, epoch, range(4), rank, 4)
        assert [index.item for index in itertools.chain(*ours)] == list(stock)


def test_epochs_and_seeds_differ_in_their_order():
    orders = {
        tuple(epoch_permutation(50, epoch, shuffle=True, seed=seed).tolist())
        for epoch, seed in [(0, 0), (1, 0), (0, 100)]
    }
    assert len(orders) == 3


@pytest.mark.parametrize("num_samples", [1, 5, 24, 31])
def test_an_epoch_has_every_sample_once_in_update_steps_that_do_not_depend_on_the_ranks(num_samples):
    order = epoch_permutation(num_samples, epoch=3, shuffle=True).tolist()
    steps = ShuffledOrder(num_samples, 12)
    expected = {(order[i], 3, i // 12, i % 12, min(num_samples - i // 12 * 12, 12)) for i in range(num_samples)}
    for dp_degree in (1, 2, 3, 4, 5, 7, 12, 13):
        found = [
            index
            for step in range(steps.num_steps(3))
            for share in on_ranks(steps, 3, step, dp_degree)
            for index in share
        ]
        assert len(found) == num_samples
        assert set(found) == expected


def test_done_update_steps_are_those_that_end_within_the_consumed_samples():
    order = ShuffledOrder(31, 12)
    for consumed in range(40):
        assert num_done(order, 0, consumed) == sum(order.end(0, step) <= consumed for step in range(3))
    assert num_done(ShuffledOrder(10**11, 10), 0, 10**10 + 9) == 10**9


def on_ranks(order, epoch, step, dp_degree, block=1):
    """Returns the samples of each rank in an update step."""
    steps = range(step, step + 1)
    return [OnRank(order, epoch, steps, rank, dp_degree, block)[0] for rank in range(dp_degree)]


@pytest.mark.parametrize(("size", "shares"), [(16, [6, 5, 5]), (12, [4, 4, 4]), (7, [4, 3]), (2, [1, 1, 0]), (5, [5])])
def test_samples_are_dealt_to_ranks_in_turn(size, shares):
    order = ShuffledOrder(size, size, shuffle=False)
    dealt = on_ranks(order, 0, 0, len(shares))
    assert [len(share) for share in dealt] == shares
    assert OnRank(order, 0, range(1), 0, len(shares)).most_on_a_rank(0) == shares[0]


@pytest.mark.parametrize("num_samples", [8, 15, 16, 17])
def test_drop_counts_full_update_steps_and_train_the_short_one_too(num_samples):
    windows = [range(num_samples)[start : start + 8] for start in range(0, num_samples, 8)]
    assert ShuffledOrder(num_samples, 8).num_steps(0) == len(windows)
    assert ShuffledOrder(num_samples, 8, drop_last=True).num_steps(0) == sum(len(w) == 8 for w in windows)
    for most in (1, 9):
        expected = min(len(windows), most)
        assert ShuffledOrder(num_samples, 8, max_steps_per_epoch=most).num_steps(0) == expected


@pytest.mark.parametrize("dp_degree", [1, 2, 4])
@pytest.mark.parametrize(("num_samples", "block"), [(19, 1), (37, 16), (64, 16), (128, 2), (3, 4)])
def test_blocks_of_an_update_step_stay_on_a_rank_and_shares_differ_by_at_most_one(num_samples, block, dp_degree):
    order = ShuffledOrder(num_samples, 64)
    shares, window = on_ranks(order, 2, 0, dp_degree, block), order.samples(2, 0).tolist()
    assert sorted(index.item for index in itertools.chain(*shares)) == sorted(window)
    ranks_of_blocks = {}
    for rank, share in enumerate(shares):
        positions = [index.position for index in share]
        assert positions == sorted(positions)
        assert [window[index.position] for index in share] == [index.item for index in share]
        for position in positions:
            ranks_of_blocks.setdefault(position // block, set()).add(rank)
    assert all(len(ranks) == 1 for ranks in ranks_of_blocks.values())
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= block
