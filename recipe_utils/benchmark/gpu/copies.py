"""Stage 6: microbatches arrive unharmed under a busy device, and FSDP2 on a mesh of one changes nothing."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recipe_utils.benchmark.gpu.attention import build, on_device, one_layer
from recipe_utils.benchmark.gpu.crafted import packed_row
from recipe_utils.benchmark.gpu.in_process import embedded_config, joined_ranks, train
from recipe_utils.benchmark.gpu.measure import Result, Settings, at_most, attempt, check
from recipe_utils.data.loader.microbatch import Microbatch, mark_last
from recipe_utils.data.loader.to_device import to_device_ahead
from recipe_utils.parallel.fsdp import gradient_sync, shard_model
from recipe_utils.parallel.ranks import Ranks

_BUSY_CYCLES = 2_000_000
"""That the compute stream sleeps before it reads a microbatch: about a millisecond."""


def copies(settings: Settings) -> Result:
    """Checksums of the copy ahead; gradients of FSDP2 with both ``gradient_sync``; ``fsdp_cpu_offload``."""
    with joined_ranks(settings) as ranks:
        checks = [
            attempt("copy ahead", partial(_checksums, settings)),
            *(
                attempt(when, partial(_sharded, settings, ranks, when))
                for when in ("each_microbatch", "last_microbatch")
            ),
        ]
    return {"checks": [*checks, attempt("fsdp_cpu_offload", partial(_offloaded, settings))]}


def _checksums(settings: Settings) -> Result:
    """The host's buffers are let go as soon as a copy has begun, so later ones take their place."""
    num_microbatches, longest = (20, 1_000) if settings.is_small else (200, 1_000_000)
    rng = random.Random(0)
    expected: list[int] = []

    def made() -> Iterator[Tensor]:
        for seed in range(num_microbatches):
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(
                2**20, (rng.randint(longest // 2, longest),), generator=generator
            )
            expected.append(int(tokens.sum()))
            yield tokens.pin_memory() if settings.is_cuda else tokens

    sums = []
    for tokens in to_device_ahead(made(), settings.device):
        if settings.is_cuda:
            torch.cuda._sleep(_BUSY_CYCLES)
        sums.append(tokens.sum())
        # Whoever gets this block next finds it overwritten, if only the device's order protects it.
        del tokens
        torch.full((longest,), -1, dtype=torch.int64, device=settings.device)
    num_wrong = sum(int(a) != b for a, b in zip(sums, expected, strict=True))
    return at_most(f"copy ahead: wrong of {num_microbatches} microbatches", num_wrong, 0)


def _sharded(settings: Settings, ranks: Ranks, when: str) -> Result:
    """Gradients of two microbatches, sharded over one rank, against those without FSDP2."""
    slots = 64 if settings.is_small else 2048
    component = one_layer(settings, slots)
    rows = [packed_row([slots // 4, slots - slots // 4], 256, seed) for seed in (0, 100)]
    rows = [on_device(row, settings.device) for row in rows]
    plain = build(component, ranks)
    expected = _gradients(plain, rows, when)
    sharded = build(component, ranks)
    shard_model(
        sharded,
        ranks.mesh,
        custom_sharded_layers=None,
        cpu_offload=False,
        reshard_after_forward=True,
    )
    found = _gradients(sharded, rows, when)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    return at_most(f"FSDP2, gradient_sync={when}: gradients", max(errors), 1e-5)


def _gradients(model: nn.Module, rows: list[Microbatch], when: str) -> list[Tensor]:
    for row, is_last in mark_last(rows):
        with gradient_sync(model, is_last, when):
            model(**row.inputs, targets=row.targets)[0].backward()
    gradients: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    return [each.to_local() if hasattr(each, "to_local") else each for each in gradients]


def _offloaded(settings: Settings) -> Result:
    """On a CPU the key changes nothing."""
    config = partial(embedded_config, settings, max_steps_per_epoch=3)
    expected = train(config("not offloaded"))["loss"]
    found = train(config("offloaded", fsdp_cpu_offload=True))["loss"]
    errors = [abs(a / b - 1) for a, b in zip(found, expected, strict=True)]
    return check("fsdp_cpu_offload: losses", max(errors) <= 1e-4, found, expected)
