"""Samples reach the microbatch that they are planned for, whole and in the plan's order."""

import threading
from functools import partial

import torch.distributed as dist
from distributed_runs import run_distributed

from recipe_utils.data.loader.collectives import (
    OtherRankFailedError,
    exchange_samples,
    group_samples,
)
from recipe_utils.data.loader.plan import plan_packed


def sample(name, length):
    return {"tokens": [name] * length, "labels": list(range(length))}


def num_tokens(sample):
    return len(sample["tokens"])


def exchange(samples_of_rank, plan, dp_peers_of_rank=None, length_of=num_tokens):
    rank = dist.get_rank()
    peers = dp_peers_of_rank[rank] if dp_peers_of_rank else list(range(dist.get_world_size()))
    try:
        return exchange_samples(
            samples_of_rank[rank],
            length_of,
            plan,
            4,
            peers,
            dist.group.WORLD,
            threading.Event(),
        )
    except OtherRankFailedError as error:
        return str(error)


def plan_reversed(lengths, num_ranks):
    """Everything moves: positions in turn, the last first; two to a microbatch."""
    positions = range(len(lengths))[::-1]
    of_ranks = [list(positions[rank::num_ranks]) for rank in range(num_ranks)]
    return [[rank[i : i + 2] for i in range(0, len(rank), 2)] for rank in of_ranks]


def names(microbatches):
    return [[sample["tokens"][0] for sample in microbatch] for microbatch in microbatches]


def test_samples_arrive_whole_in_the_order_of_the_plan():
    held = [[sample(0, 3), sample(1, 1), sample(2, 2), sample(3, 4)], [], [sample(4, 5)]]
    got = run_distributed(exchange, 3, held, plan_reversed)
    assert [names(microbatches) for microbatches in got] == [[[4, 1]], [[3, 0]], [[2]]]
    assert got[0] == [[sample(4, 5), sample(1, 1)]]


def test_tensor_parallel_ranks_exchange_with_their_like():
    """Ranks 0 and 1 hold one coordinate's data, 2 and 3 the other's."""
    first, second = [sample(0, 9), sample(1, 9)], [sample(2, 1), sample(3, 1)]
    plan = partial(plan_packed, max_tokens_per_microbatch=10)
    got = run_distributed(
        exchange, 4, [first, first, second, second], plan, [[0, 2], [1, 3], [0, 2], [1, 3]]
    )
    for rank in (0, 1):
        assert sorted(names(got[rank])[0] + names(got[rank + 2])[0]) == [0, 1, 2, 3]
        assert sorted(len(s["tokens"]) for s in got[rank][0]) == [1, 9]
        assert got[rank] == got[0 if rank < 2 else 2]


def test_a_rank_without_samples_to_give_stops_the_others_by_name():
    got = run_distributed(exchange, 2, [[sample(0, 3)], None], plan_packed)
    assert "rank(s) [1] could not prepare" in got[0]
    assert got[1] == []


def test_a_rank_by_itself_plans_without_any_other():
    samples = [sample(0, 3), sample(1, 1), sample(2, 2)]
    assert names(group_samples(samples, num_tokens, plan_reversed)) == [[2, 1], [0]]


def first_token(sample):
    return sample["tokens"][0]


def plan_by_length(lengths, num_ranks):
    """The samples of each length on a rank of their own."""
    return [[[p for p, n in enumerate(lengths) if n == rank]] for rank in range(num_ranks)]


def test_a_sample_s_length_is_what_its_kind_says():
    held = [[sample(0, 3), sample(1, 1)], [sample(1, 4), sample(0, 2)]]
    got = run_distributed(exchange, 2, held, plan_by_length, None, first_token)
    assert [names(microbatches) for microbatches in got] == [[[0, 0]], [[1, 1]]]
    by_token = group_samples(held[0], first_token, lambda lengths, _: [[lengths]])
    assert by_token == [[held[0][0], held[0][1]]]
