"""Each start of a job has a process group of its own, and its ranks agree over the CPU."""

import re
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
    init_process_group,
    mean_over_ranks,
    name_of_this_start,
    new_cpu_group,
    world_size_from_env,
)

CPU = torch.device("cpu")


def test_the_launcher_says_how_many_ranks_there_are(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert world_size_from_env() == 6
    monkeypatch.delenv("WORLD_SIZE")
    assert world_size_from_env() == 1


def test_without_a_launcher_a_process_is_a_group_of_its_own():
    assert init_process_group(CPU)
    try:
        assert dist.get_world_size() == 1
        assert not init_process_group(CPU)  # whoever made it ends it
    finally:
        dist.destroy_process_group()


def names_of_a_start(store, world_size):
    store.set_timeout(timedelta(seconds=30))
    with ThreadPoolExecutor(world_size) as pool:
        return list(
            pool.map(partial(name_of_this_start, store, world_size=world_size), range(world_size))
        )


def test_each_start_of_a_job_has_a_name_of_its_own_in_the_same_store():
    store = dist.HashStore()
    first, second = names_of_a_start(store, 3), names_of_a_start(store, 3)
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


def test_what_killed_ranks_have_left_in_the_store_is_not_taken_for_this_starts():
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError):
        name_of_this_start(store, 2, 3)  # it asks, and ends before there is a rank 0
    with pytest.raises(dist.DistStoreError):
        name_of_this_start(store, 0, 2)  # it waits for a rank 1 that does not come
    assert len(set(names_of_a_start(store, 3))) == 1


def sums_of(rank):
    """What a rank's metrics could be: numbers that no mean in floats rounds."""
    return [3.0 + rank, -8.0 * rank, 0.25]


def on_two_ranks():
    rank, group = dist.get_rank(), new_cpu_group()
    lengths = [agree_on_length(7, group)]
    try:
        agree_on_length(7 + 2 * rank, group)
    except ValueError as error:
        lengths.append(str(error))
    together = torch.tensor(sums_of(rank), requires_grad=True)
    means = mean_over_ranks(together).tolist()
    one_by_one = [mean_over_ranks(torch.tensor(value)).tolist() for value in sums_of(rank)]
    return lengths, means, one_by_one, together.tolist(), gather_objects({"rank": rank}, group)


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(on_two_ranks, 2)


def test_ranks_that_see_datasets_of_unequal_length_are_told_both(two_ranks):
    for (agreed, refused), *_ in two_ranks:
        assert agreed == 7
        assert re.search(r"rank 0 has 7 samples, rank 1 has 9", refused)


def test_the_means_over_ranks_are_the_same_on_every_rank(two_ranks):
    assert [means for _, means, *_ in two_ranks] == [[3.5, -4.0, 0.25]] * 2


def test_the_means_of_a_vector_are_those_of_its_entries(two_ranks):
    for _, means, one_by_one, *_ in two_ranks:
        assert [[mean] for mean in means] == one_by_one


def test_a_mean_over_ranks_leaves_what_it_is_of_as_it_was(two_ranks):
    for rank, (*_, after, _) in enumerate(two_ranks):
        assert after == sums_of(rank)


def test_every_rank_sees_what_the_others_have_said_in_their_order(two_ranks):
    for *_, gathered in two_ranks:
        assert gathered == [{"rank": 0}, {"rank": 1}]


def test_a_process_without_a_group_sees_its_own_word():
    assert gather_objects("mine", None) == ["mine"]
