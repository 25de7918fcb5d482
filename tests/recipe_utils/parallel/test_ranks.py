"""Meshes fit the ranks, gradients are clipped as one, and HSDP's copies talk once per update step."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import tiny
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from torch import nn

from recipe_utils.parallel.ranks import (
    GRADIENT_SYNC,
    ParallelDims,
    agree_on_length,
    build_mesh,
    clip_grad_norm_,
    counts_its_data,
    dp_rank_of,
    gradient_sync,
    init_process_group,
    mean_over_ranks,
    name_of_this_start,
    new_cpu_group,
    resolve_parallel_dims,
    shard_model,
    world_size_from_env,
)

CPU = torch.device("cpu")
WRAPPING = {"custom_sharded_layers": None, "cpu_offload": False, "reshard_after_forward": True}


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


def parameters_with_gradients(scale=1.0):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(3, 4), (5,), (2, 2)]]
    for parameter in parameters[:2]:  # the last one was not used
        parameter.grad = scale * torch.randn(parameter.shape)
    return parameters


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e6, float("inf")])
def test_plain_gradients_are_clipped_as_torch_clips_them(max_norm):
    ours, theirs = parameters_with_gradients(), parameters_with_gradients()
    norm = clip_grad_norm_(ours, max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected)
    for our, their in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(our.grad, their.grad)


@pytest.mark.parametrize("scale", [1.0, float("inf"), float("nan")])
def test_an_infinite_limit_measures_and_changes_nothing(scale):
    measured, untouched = parameters_with_gradients(scale), parameters_with_gradients(scale)
    norm = clip_grad_norm_(measured, float("inf"))
    torch.testing.assert_close(
        norm,
        torch.cat([p.grad.flatten() for p in untouched[:2]]).norm(),
        equal_nan=True,
    )
    for parameter, same in zip(measured[:2], untouched[:2], strict=True):
        assert torch.equal(parameter.grad.nan_to_num(7), same.grad.nan_to_num(7))


def sharded(mesh):
    model = tiny.tiny_model()
    shard_model(model, mesh, **WRAPPING)
    return model


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randint(tiny.VOCAB_SIZE, (1, 9), generator=generator)).square().mean()


def on_two_ranks():
    rank, group = dist.get_rank(), new_cpu_group()
    lengths = [agree_on_length(7, group)]
    try:
        agree_on_length(7 + 2 * rank, group)
    except ValueError as error:
        lengths.append(str(error))

    plain, model = tiny.tiny_model(), sharded(build_mesh(CPU, ParallelDims(1, 2, 1)))
    norms = []
    for each in (plain, model):
        loss_of(each, seed=0).backward()
        norms.append(clip_grad_norm_(each.parameters(), 0.01).item())
    gradients = [
        (p.grad, sharded_p.grad.full_tensor())
        for p, sharded_p in zip(plain.parameters(), model.parameters(), strict=True)
    ]
    distance = max((p - s).abs().max().item() for p, s in gradients)
    largest = max(p.abs().max().item() for p, _ in gradients)
    return lengths, norms, distance / largest, mean_over_ranks(torch.tensor(3.0 + rank))


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(on_two_ranks, 2)


def test_ranks_that_see_datasets_of_unequal_length_are_told_both(two_ranks):
    for (agreed, refused), *_ in two_ranks:
        assert agreed == 7
        assert re.search(r"rank 0 has 7 samples, rank 1 has 9", refused)


def test_sharded_gradients_are_clipped_by_the_norm_of_all_shards(two_ranks):
    for _, (plain, of_shards), distance, _ in two_ranks:
        assert of_shards == pytest.approx(plain, rel=1e-5)
        assert plain > 0.01  # something was clipped
        assert distance < 1e-4


def test_the_mean_over_ranks_is_the_same_on_every_rank(two_ranks):
    assert [mean for *_, mean in two_ranks] == [3.5, 3.5]


def count_all_reduces(mesh, make_context, num_microbatches):
    """All-reduces between the copies in one update step, and the gradients it ends with."""
    model, of_copies = sharded(mesh), []
    all_reduce, replicate_group = dist.all_reduce, mesh.get_group("dp_replicate")

    def counting_all_reduce(*args, **kwargs):
        if kwargs.get("group") is replicate_group:
            of_copies.append(args)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counting_all_reduce  # as FSDP2 calls it
    try:
        for i in range(num_microbatches):
            with make_context(model, i == num_microbatches - 1):
                loss_of(model, seed=10 * i + dist.get_rank()).backward()
    finally:
        dist.all_reduce = all_reduce
    return len(of_copies), [p.grad.full_tensor().clone() for p in model.parameters()]


def all_reduces_on_four_ranks():
    mesh = build_mesh(CPU, ParallelDims(2, 2, 1))
    contexts = {"no_flags": lambda model, is_last: nullcontext()} | {
        when: lambda model, is_last, when=when: gradient_sync(model, is_last, when)
        for when in GRADIENT_SYNC
    }
    counts, distance = {}, 0.0
    for num_microbatches in (1, 2, 4):
        gradients = {}
        for name, make_context in contexts.items():
            counts[name, num_microbatches], gradients[name] = count_all_reduces(
                mesh, make_context, num_microbatches
            )
        for when in GRADIENT_SYNC:
            for p, q in zip(gradients[when], gradients["no_flags"], strict=True):
                distance = max(distance, ((p - q).abs().max() / q.abs().max()).item())
    tp_mesh = build_mesh(CPU, ParallelDims(1, 2, 2))
    places = [dp_rank_of(mesh), dp_rank_of(tp_mesh)]
    return counts, distance, places, [counts_its_data(m) for m in (mesh, tp_mesh)]


@pytest.fixture(scope="module")
def four_ranks():
    return run_distributed(all_reduces_on_four_ranks, 4)


def test_all_reduces_between_copies_do_not_grow_with_the_number_of_microbatches(four_ranks):
    for counts, *_ in four_ranks:
        assert counts["no_flags", 1] > 0
        for when in GRADIENT_SYNC:
            for num_microbatches in (1, 2, 4):
                assert counts[when, num_microbatches] == counts["no_flags", 1]


def test_without_the_flags_they_do_grow(four_ranks):
    for counts, *_ in four_ranks:
        for num_microbatches in (2, 4):
            assert counts["no_flags", num_microbatches] == num_microbatches * counts["no_flags", 1]


def test_the_flags_leave_the_gradients_as_they_are(four_ranks):
    for _, distance, *_ in four_ranks:
        assert distance < 1e-5


def test_ranks_of_one_tensor_parallel_group_hold_the_same_data_and_one_counts_it(four_ranks):
    places = [places for *_, places, _ in four_ranks]
    assert [without_tp for without_tp, _ in places] == [0, 1, 2, 3]
    assert [with_tp for _, with_tp in places] == [0, 0, 1, 1]
    firsts = [firsts for *_, firsts in four_ranks]
    assert all(without_tp for without_tp, _ in firsts)
    for place in (0, 1):
        counting = [f for (_, p), (_, f) in zip(places, firsts, strict=True) if p == place]
        assert sum(counting) == 1


def test_a_model_that_is_not_sharded_needs_no_sync():
    model = tiny.tiny_model()
    for is_last in (False, True):
        with gradient_sync(model, is_last, "each_microbatch"):
            loss_of(model, seed=0).backward()
    assert all(p.grad is not None for p in model.parameters())
