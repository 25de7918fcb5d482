"""Meshes fit the ranks, and each rank knows what it holds and with whom."""

import pytest
import torch
import torch.distributed as dist
from distributed_runs import run_distributed

from recipe_utils.parallel.process_group import init_process_group
from recipe_utils.parallel.ranks import (
    RankSettings,
    join_ranks,
    resolve_device,
    resolve_parallel_dims,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("world_size", "dims", "expected"),
    [
        (1, (1, -1, 1), (1, 1, 1)),
        (8, (1, -1, 1), (1, 8, 1)),
        (8, (2, -1, 1), (2, 4, 1)),
        (8, (2, -1, 2), (2, 2, 2)),
        (8, (2, 2, 2), (2, 2, 2)),
        (8, (1, -1, 8), (1, 1, 8)),
    ],
)
def test_the_sharding_dimension_takes_what_the_others_leave(world_size, dims, expected):
    resolved = resolve_parallel_dims(world_size, *dims)
    assert resolved == (*expected, 1)
    assert resolved.dp_degree * resolved.tp == world_size


@pytest.mark.parametrize(
    ("world_size", "dims", "parts"),
    [
        (8, (2, 3, 1), ["6 ranks", "8 run", "start 6 processes"]),
        (6, (1, -1, 4), ["4 ranks", "6 run", "data_parallel_shard_dim=-1"]),
        (2, (4, -1, 1), ["4 ranks", "2 run"]),
        (4, (0, -1, 1), ["data_parallel_replicate_dim=0", "at least 1"]),
        (4, (1, -1, -2), ["tensor_parallel_dim=-2", "at least 1"]),
        (4, (1, 0, 1), ["data_parallel_shard_dim=0", "at least 1"]),
        (4, (1, -2, 1), ["data_parallel_shard_dim=-2", "at least 1"]),
    ],
)
def test_dimensions_that_do_not_make_the_world_size_are_refused_with_both_numbers(
    world_size, dims, parts
):
    with pytest.raises(ValueError, match="parallel") as raised:
        resolve_parallel_dims(world_size, *dims)
    for part in parts:
        assert part in str(raised.value)


def test_a_device_that_is_there_is_taken():
    assert resolve_device("cpu").type == "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert resolve_device(None).type == ("cpu" if accelerator is None else accelerator.type)


@pytest.mark.parametrize("device", ["abacus", "cuda", "xpu"])
def test_a_device_that_is_not_there_is_refused_by_key(device):
    if device != "abacus" and getattr(torch, device).is_available():
        pytest.skip(f"this machine has {device}")
    with pytest.raises(ValueError, match=f"device={device}: "):
        resolve_device(device)


# ---- Settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"device": "abacus"}, "device=abacus: "),
        ({"context_parallel_dim": 2}, "context_parallel_dim=2: "),
        (
            {"data_parallel_shard_dim": 3},
            "data_parallel_replicate_dim=1 * data_parallel_shard_dim=3",
        ),
        ({"data_parallel_shard_dim": 0}, "data_parallel_shard_dim=0: "),
    ],
)
def test_what_this_job_or_machine_cannot_do_is_a_problem_by_name(settings, key, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    (problem,) = RankSettings(**settings).problems()
    assert str(problem).startswith(key)
    assert list(RankSettings().problems()) == []


def test_dimensions_are_those_of_the_processes_that_the_launcher_has_started(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    settings = RankSettings(data_parallel_replicate_dim=2, pipeline_parallel_dim=2)
    assert settings.dims == settings.dims_or_none == (2, 2, 1, 2)
    assert settings.dims.dp_degree == 4
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert settings.dims_or_none is None
    with pytest.raises(ValueError, match="4 ranks, but 6 run"):
        _ = settings.dims


# ---- Ranks --------------------------------------------------------------------------------------


def test_without_a_launcher_a_process_is_rank_0_of_one():
    ranks = join_ranks(RankSettings(device="cpu"))
    assert (ranks.rank, ranks.world_size, ranks.is_zero) == (0, 1, True)
    assert (ranks.dp_degree, ranks.dp_rank, ranks.dp_peers) == (1, 0, [0])
    assert (ranks.pp_rank, ranks.pp_group, ranks.is_dp_leader) == (0, None, True)
    assert ranks.device == CPU
    ranks.leave()
    assert not dist.is_initialized()


def test_who_did_not_make_the_process_group_does_not_end_it():
    assert init_process_group(CPU)
    try:
        join_ranks(RankSettings(device="cpu")).leave()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


LAYOUTS = [
    {"data_parallel_replicate_dim": 2},
    {"tensor_parallel_dim": 2},
    {"pipeline_parallel_dim": 2, "gradient_sync": "last_microbatch"},
]


def places_on_four_ranks():
    """For each of the layouts, what a rank knows of itself and of the others."""
    found = []
    for layout in LAYOUTS:
        ranks = join_ranks(RankSettings(device="cpu", **layout))
        size_of_pipeline = None if ranks.pp_group is None else dist.get_world_size(ranks.pp_group)
        found.append(
            {
                "dp": (ranks.dp_rank, ranks.dp_degree),
                "peers": ranks.dp_peers,
                "leads": ranks.is_dp_leader,
                "pp": (ranks.pp_rank, size_of_pipeline),
                "cpu": dist.get_backend(ranks.new_cpu_group()),
            }
        )
    return found


@pytest.fixture(scope="module")
def four_ranks():
    return run_distributed(places_on_four_ranks, 4)


def of_layout(four_ranks, layout, name):
    return [rank[layout][name] for rank in four_ranks]


def test_copies_and_shards_all_hold_data_of_their_own(four_ranks):
    assert of_layout(four_ranks, 0, "dp") == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert of_layout(four_ranks, 0, "peers") == [[0, 1, 2, 3]] * 4
    assert of_layout(four_ranks, 0, "leads") == [True] * 4


def test_ranks_of_one_tensor_parallel_group_hold_the_same_data_and_one_counts_it(four_ranks):
    assert of_layout(four_ranks, 1, "dp") == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert of_layout(four_ranks, 1, "peers") == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert of_layout(four_ranks, 1, "leads") == [True, False, True, False]


def test_ranks_of_one_pipeline_hold_the_same_data_and_one_counts_it(four_ranks):
    assert of_layout(four_ranks, 2, "dp") == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert of_layout(four_ranks, 2, "peers") == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert of_layout(four_ranks, 2, "leads") == [True, True, False, False]
    assert of_layout(four_ranks, 2, "pp") == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert of_layout(four_ranks, 0, "pp") == [(0, None)] * 4


def test_groups_for_background_threads_are_of_the_cpu(four_ranks):
    for layout in range(3):
        assert of_layout(four_ranks, layout, "cpu") == ["gloo"] * 4
