"""Forecast of memory and computation without weights, a GPU, or other ranks: ``python -m recipe_utils.forecast``.

Shapes of a recipe's own ``setup`` and ``update`` are computed on fake tensors, and bytes of storages counted.
"""

import gc
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.sampler import StepIndex
from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.optim.optimizer import single_optimizers
from recipe_utils.parallel.fsdp import local

UNITS = ("positions", "images")
"""Counts of a microbatch that memory grows with."""


class Measured(NamedTuple):
    """Update step of equal microbatches on one rank."""

    size: int
    """Positions, or images, of each microbatch."""
    peak: int
    """Highest bytes of live storages."""
    flops: int
    """FLOPs per microbatch, recomputation included, without the optimizer's."""


class Shares(NamedTuple):
    """Bytes on one rank between update steps, and of gradients."""

    weights: int
    gradients: int
    optimizer: int
    other: int
    """Frozen models and tables of positions."""


def measure(
    recipe: Any,
    size: int,
    live: LiveBytes,
    mode: AbstractContextManager[Any] | None = None,
    num_microbatches: int = 2,
) -> Measured:
    """Runs ``update`` of a recipe that was set up on ``FakeDataset``, with microbatches of about ``size``."""
    microbatch = microbatch_of(recipe.loader, size)
    totals = {name: num_microbatches * number for name, number in microbatch.counts.items()}
    step = UpdateStep(0, (microbatch,) * num_microbatches, totals, recipe.ranks.dp_degree)
    gc.collect()
    live.peak, live.flops = live.now, 0
    with mode or nullcontext(), live:
        recipe.update(step)
    size = next(microbatch.counts[unit] for unit in UNITS if unit in microbatch.counts)
    return Measured(size, live.peak, live.flops // num_microbatches)


def microbatch_of(loader: Any, size: int) -> Microbatch:
    """Returns a microbatch of about ``size`` positions, or of so many images."""
    collate, dataset = loader.collator.collate, loader.dataset
    if "images" in loader.collator.counts:
        return collate([dataset[StepIndex(i, position=i, step_size=size)] for i in range(size)])
    longest = dataset.dataset.length
    of_one = collate([dataset[0]]).counts["positions"]
    if of_one > size:
        dataset.dataset.length = longest * size // of_one
    made = collate([dataset[0]] * max(size // of_one, 1))
    dataset.dataset.length = longest
    return made


def shares_of(recipe: Any, live: LiveBytes) -> Shares:
    """Returns bytes after an update step."""
    model, optimizers = recipe.model, single_optimizers(recipe.optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    states = [s for each in optimizers for of_one in each.state.values() for s in of_one.values()]
    weights, optimizer = _bytes_of([*model.parameters(), *model.buffers()]), _bytes_of(states)
    gradients = sum(local(p).nbytes for p in trained)
    return Shares(weights, gradients, optimizer, live.now - weights - optimizer)


def _bytes_of(values: Iterable[Any]) -> int:
    storages = LiveBytes()
    for value in values:
        if isinstance(value, Tensor):
            storages.hold(value)
    return storages.now
