"""HSDP's copies talk once per update step, and the gradients are the same."""

from contextlib import nullcontext
from typing import get_args

import pytest
import tiny
import torch
import torch.distributed as dist
from distributed_runs import run_distributed

from recipe_utils.parallel.fsdp import GradientSync, gradient_sync, shard_model
from recipe_utils.parallel.ranks import ParallelDims, build_mesh

CPU = torch.device("cpu")
WRAPPING = {"custom_sharded_layers": None, "cpu_offload": False, "reshard_after_forward": True}
GRADIENT_SYNC = get_args(GradientSync)


def sharded(mesh):
    model = tiny.tiny_model()
    shard_model(model, mesh, **WRAPPING)
    return model


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randint(tiny.VOCAB_SIZE, (1, 9), generator=generator)).square().mean()


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
    return counts, distance


@pytest.fixture(scope="module")
def four_ranks():
    return run_distributed(all_reduces_on_four_ranks, 4)


def test_all_reduces_between_copies_do_not_grow_with_the_number_of_microbatches(four_ranks):
    for counts, _ in four_ranks:
        assert counts["no_flags", 1] > 0
        for when in GRADIENT_SYNC:
            for num_microbatches in (1, 2, 4):
                assert counts[when, num_microbatches] == counts["no_flags", 1]


def test_without_the_flags_they_do_grow(four_ranks):
    for counts, _ in four_ranks:
        for num_microbatches in (2, 4):
            assert counts["no_flags", num_microbatches] == num_microbatches * counts["no_flags", 1]


def test_the_flags_leave_the_gradients_as_they_are(four_ranks):
    for _, distance in four_ranks:
        assert distance < 1e-5


def test_a_model_that_is_not_sharded_needs_no_sync():
    model = tiny.tiny_model()
    for is_last in (False, True):
        with gradient_sync(model, is_last, "each_microbatch"):
            loss_of(model, seed=0).backward()
    assert all(p.grad is not None for p in model.parameters())
