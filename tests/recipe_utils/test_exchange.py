"""Samples reach the rank that they are dealt to, whole and in the deal's order."""

import threading
from functools import partial

import pytest
import torch.distributed as dist
from distributed_runs import run_distributed
from hypothesis import given
from hypothesis import strategies as st

from recipe_utils.count import OtherRankFailedError
from recipe_utils.exchange import exchange_samples
from recipe_utils.plan import MicrobatchCost, deal_evenly


def sample(name, length):
    return {"tokens": [name] * length, "labels": list(range(length))}


def exchange(samples_of_rank, deal, dp_peers_of_rank=None):
    rank = dist.get_rank()
    peers = dp_peers_of_rank[rank] if dp_peers_of_rank else list(range(dist.get_world_size()))
    try:
        return exchange_samples(
            samples_of_rank[rank], deal, 4, peers, dist.group.WORLD, threading.Event()
        )
    except OtherRankFailedError as error:
        return str(error)


def deal_reversed(lengths, num_ranks):
    """Everything moves: positions in turn, the last first."""
    positions = range(len(lengths))[::-1]
    return [list(positions[rank::num_ranks]) for rank in range(num_ranks)]


def names(samples):
    return [sample["tokens"][0] for sample in samples]


def test_samples_arrive_whole_in_the_order_of_the_deal():
    held = [[sample(0, 3), sample(1, 1), sample(2, 2)], [], [sample(3, 5)]]
    got = run_distributed(exchange, 3, held, partial(deal_reversed, num_ranks=3))
    assert [names(samples) for samples in got] == [[3, 0], [2], [1]]
    assert got[0] == [sample(3, 5), sample(0, 3)]


def test_tensor_parallel_ranks_exchange_with_their_like():
    """Ranks 0 and 1 hold one coordinate's data, 2 and 3 the other's."""
    first, second = [sample(0, 9), sample(1, 9)], [sample(2, 1), sample(3, 1)]
    got = run_distributed(
        exchange,
        4,
        [first, first, second, second],
        partial(deal_evenly, num_ranks=2),
        [[0, 2], [1, 3], [0, 2], [1, 3]],
    )
    assert [names(samples) for samples in got] == [[0, 2], [0, 2], [1, 3], [1, 3]]


def test_a_rank_without_samples_to_give_stops_the_others_by_name():
    got = run_distributed(exchange, 2, [[sample(0, 3)], None], partial(deal_evenly, num_ranks=2))
    assert "rank(s) [1] could not prepare" in got[0]
    assert got[1] == []


LENGTHS = st.lists(st.integers(1, 600), max_size=60)


@given(LENGTHS, st.integers(1, 9))
def test_a_deal_has_every_sample_once(lengths, num_ranks):
    dealt = deal_evenly(lengths, num_ranks)
    assert len(dealt) == num_ranks
    assert sorted(position for rank in dealt for position in rank) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 9))
def test_the_costliest_rank_exceeds_the_cheapest_by_no_more_than_one_sample(lengths, num_ranks):
    """So no rank without samples stands beside one with two."""
    cost = MicrobatchCost(0, 100)
    loads = [
        sum(cost(1, lengths[p]) for p in rank) for rank in deal_evenly(lengths, num_ranks, cost)
    ]
    assert max(loads) - min(loads) <= max((cost(1, length) for length in lengths), default=0) + 1e-9


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_dealing_brings_the_ranks_within_a_few_percent(num_ranks):
    """16 samples a rank, lengths spread as wide as documents are; undealt they are far apart."""
    lengths = [31 + (i * i * 7919) % 480 for i in range(16 * num_ranks)]
    dealt = [sum(lengths[p] for p in rank) for rank in deal_evenly(lengths, num_ranks)]
    mean = sum(lengths) / num_ranks
    assert max(dealt) / mean < 1.03
