"""HSDP's copies communicate once per update step, and the gradients are the same."""

from contextlib import nullcontext
from functools import partial
from typing import get_args

import tiny
import torch
import torch.distributed as dist
from distributed_runs import run_distributed

from recipe_utils.parallel.fsdp import GradientSync, gradient_sync, shard_model
from recipe_utils.parallel.ranks import ParallelDims, build_mesh

CPU = torch.device("cpu")
WRAPPING = {"custom_sharded_layers": None, "cpu_offload": False, "reshard_after_forward": True}
GRADIENT_SYNC = get_args(GradientSync)


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randint(tiny.VOCAB_SIZE, (1, 9), generator=generator)).square().mean()


def count_all_reduces(mesh, make_context, num_microbatches):
    """All-reduces between the copies in one update step, and the gradients it ends with."""
    model, of_copies = tiny.tiny_model(), []
    shard_model(model, mesh, **WRAPPING)
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
    """Numbers of all-reduces by context and microbatches, and the distance of gradients."""
    mesh = build_mesh(CPU, ParallelDims(2, 2, 1))
    counts, distances = {}, []
    for num in (1, 2, 4):
        plain = lambda model, is_last: nullcontext()  # noqa: E731
        counts["plain", num], expected = count_all_reduces(mesh, plain, num)
        for when in GRADIENT_SYNC:
            sync = partial(gradient_sync, when=when)
            counts[when, num], gradients = count_all_reduces(mesh, sync, num)
            for p, q in zip(gradients, expected, strict=True):
                distances.append(((p - q).abs().max() / q.abs().max()).item())
    return counts, max(distances)


def test_the_number_of_all_reduces_between_copies_is_that_of_one_microbatch():
    for counts, distance in run_distributed(all_reduces_on_four_ranks, 4):
        once = counts["plain", 1]
        assert once > 0
        for num_microbatches in (1, 2, 4):
            assert counts["plain", num_microbatches] == num_microbatches * once
            assert {counts[when, num_microbatches] for when in GRADIENT_SYNC} == {once}
        assert distance < 1e-5
