"""Each start of a job has its own process group, and its ranks communicate on the CPU."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed_runs import run_distributed

from recipe_utils.parallel.process_group import (
    agree_on_length,
    gather_objects,
    loss_of_rank,
    mean_over_ranks,
    name_of_this_start,
    new_cpu_group,
)
from recipe_utils.settings.problems import ConfigError


def names_of_a_start(store, world_size):
    store.set_timeout(timedelta(seconds=30))
    with ThreadPoolExecutor(world_size) as pool:
        name = partial(name_of_this_start, store, world_size=world_size)
        return list(pool.map(name, range(world_size)))


def test_each_start_of_a_job_has_a_name_of_its_own_in_the_same_store():
    store = dist.HashStore()
    first, second = names_of_a_start(store, 3), names_of_a_start(store, 3)
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


def test_requests_of_killed_ranks_are_ignored():
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError):
        name_of_this_start(store, 2, 3)  # ends before there is a rank 0
    with pytest.raises(dist.DistStoreError):
        name_of_this_start(store, 0, 2)  # waits for a rank 1 that does not start
    assert len(set(names_of_a_start(store, 3))) == 1


def on_two_ranks():
    rank, group = dist.get_rank(), new_cpu_group()
    assert agree_on_length(7, group) == 7
    with pytest.raises(ValueError, match="rank 0 has 7 samples, rank 1 has 9"):
        agree_on_length(7 + 2 * rank, group)
    values = torch.tensor([3.0 + rank, -8.0 * rank, 0.25], requires_grad=True)
    before = values.tolist()
    means = mean_over_ranks(values).tolist()
    assert values.tolist() == before
    return means, gather_objects({"rank": rank}, group)


def test_ranks_compare_lengths_average_and_gather():
    for means, gathered in run_distributed(on_two_ranks, 2):
        assert means == [3.5, -4.0, 0.25]
        assert gathered == [{"rank": 0}, {"rank": 1}]


def loss_of_the_other():
    if dist.get_rank() == 1:
        os._exit(5)
    with pytest.raises(RuntimeError) as lost:
        gather_objects(1, None)
    of_key = ConfigError("dataset: it cannot be read")
    of_key.__cause__ = lost.value
    return [loss_of_rank(error) for error in (lost.value, of_key, OSError("Broken pipe"))]


def test_a_rank_that_lost_another_names_how_also_where_that_made_a_problem_of_a_key():
    (gloo, of_key, other), _ = run_distributed(loss_of_the_other, 2, expect_failures=True)
    assert gloo in ("Connection closed by peer", "Connection reset by peer")
    assert (of_key, other) == (gloo, None)
