"""Meshes fit the ranks, and each rank has its data, its pipeline and its groups."""

import pytest
import torch
import torch.distributed as dist
from distributed_runs import run_distributed

from recipe_utils.parallel.process_group import init_process_group
from recipe_utils.parallel.ranks import resolve_device
from recipe_utils.parallel.settings import RankSettings

CPU = torch.device("cpu")


def settings(replicate, shard, tp, pp=1):
    return RankSettings(
        device="cpu",
        data_parallel_replicate_dim=replicate,
        data_parallel_shard_dim=shard,
        tensor_parallel_dim=tp,
        pipeline_parallel_dim=pp,
    )


@pytest.mark.parametrize(
    ("world_size", "dims", "expected"),
    [
        (1, (1, -1, 1), (1, 1, 1, 1)),
        (8, (1, -1, 1), (1, 8, 1, 1)),
        (8, (2, -1, 2), (2, 2, 2, 1)),
        (8, (2, 2, 2), (2, 2, 2, 1)),
        (8, (2, -1, 1, 2), (2, 2, 1, 2)),
    ],
)
def test_the_sharding_dimension_takes_the_remaining_ranks(world_size, dims, expected, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    found = settings(*dims)
    assert found.dims == found.dims_or_none == expected
    assert found.dims.dp_degree == expected[0] * expected[1]
    assert list(found.problems()) == []


@pytest.mark.parametrize(
    ("world_size", "dims", "parts"),
    [
        (8, (2, 3, 1), ["data_parallel_replicate_dim=2 * ", "6 ranks", "8 run", "start 6 proc"]),
        (6, (1, -1, 4), ["4 ranks", "6 run", "data_parallel_shard_dim=-1"]),
        (6, (2, -1, 1, 2), ["4 ranks, but 6 run"]),
        (4, (1, 0, 1), ["data_parallel_shard_dim=0: it must be at least 1"]),
    ],
)
def test_dimensions_that_do_not_make_the_world_size_are_refused_with_both_numbers(world_size, dims, parts, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    found = settings(*dims)
    (problem,) = found.problems()
    assert all(part in str(problem) for part in parts)
    assert found.dims_or_none is None


def test_an_available_device_is_used():
    assert resolve_device("cpu").type == "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert resolve_device(None).type == ("cpu" if accelerator is None else accelerator.type)


MISSING_HERE = [name for name in ("cuda", "xpu") if not getattr(torch, name).is_available()]


@pytest.mark.parametrize("device", ["abacus", "cuda:99", *MISSING_HERE])
def test_an_unavailable_device_is_refused_by_key(device):
    (problem,) = RankSettings(device=device).problems()
    assert str(problem).startswith(f"device={device}: ")


# ---- Ranks --------------------------------------------------------------------------------------


def test_without_a_launcher_a_process_is_rank_0_of_one():
    ranks = RankSettings(device="cpu").join()
    assert (ranks.world_size, ranks.is_zero) == (1, True)
    assert (ranks.dp_degree, ranks.dp_rank, ranks.dp_peers) == (1, 0, [0])
    assert (ranks.pp_rank, ranks.pp_group, ranks.is_dp_leader) == (0, None, True)
    assert ranks.device == CPU
    ranks.leave()
    assert not dist.is_initialized()


def test_only_the_creator_of_the_process_group_destroys_it():
    assert init_process_group(CPU)
    try:
        RankSettings(device="cpu").join().leave()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


LAYOUTS = {
    "copies": {"data_parallel_replicate_dim": 2},
    "tp": {"tensor_parallel_dim": 2},
    "pp": {"pipeline_parallel_dim": 2, "gradient_sync": "last_microbatch"},
}


def places_on_four_ranks():
    """Returns coordinates, data-parallel peers, data-parallel leader and pipeline, by layout."""
    found = {}
    for name, layout in LAYOUTS.items():
        ranks = RankSettings(device="cpu", **layout).join()
        assert dist.get_backend(ranks.prefetch_group) == "gloo"
        size_of_pipeline = None if ranks.pp_group is None else dist.get_world_size(ranks.pp_group)
        coordinates = ranks.dp_rank, ranks.dp_degree
        pipeline = ranks.pp_rank, size_of_pipeline
        found[name] = coordinates, ranks.dp_peers, ranks.is_dp_leader, pipeline
    return found


@pytest.fixture(scope="module")
def four_ranks():
    return run_distributed(places_on_four_ranks, 4)


@pytest.mark.parametrize(
    ("layout", "coordinates", "peers", "leaders", "pipelines"),
    [
        ("copies", [(0, 4), (1, 4), (2, 4), (3, 4)], [[0, 1, 2, 3]] * 4, [0, 1, 2, 3], None),
        ("tp", [(0, 2), (0, 2), (1, 2), (1, 2)], [[0, 2], [1, 3]] * 2, [0, 2], None),
        (
            "pp",
            [(0, 2), (1, 2), (0, 2), (1, 2)],
            [[0, 1], [0, 1], [2, 3], [2, 3]],
            [0, 1],
            [(0, 2), (0, 2), (1, 2), (1, 2)],
        ),
    ],
)
def test_ranks_of_one_model_copy_have_the_same_data_and_one_counts_it(
    layout, coordinates, peers, leaders, pipelines, four_ranks
):
    found = list(zip(*(rank[layout] for rank in four_ranks), strict=True))
    is_leader = [rank in leaders for rank in range(4)]
    assert [list(each) for each in found] == [coordinates, peers, is_leader, pipelines or [(0, None)] * 4]
