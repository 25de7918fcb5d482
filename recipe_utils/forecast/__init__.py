"""Memory and FLOPs of the update steps of a recipe that runs on fake tensors."""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.sampler import StepIndex
from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.optim.optimizer import single_optimizers
from recipe_utils.parallel.fsdp import local

_MOST_DOCUMENTS = 8
"""Documents of a long row. More documents take the same bytes, but longer to measure."""


class Measured(NamedTuple):
    """Positions (or images) per microbatch, peak bytes, and FLOPs per microbatch without the optimizer's."""

    size: int
    peak: int
    flops: int


def measure(
    recipe: Any,
    size: int,
    live: LiveBytes,
    mode: AbstractContextManager[Any] | None = None,
    num_microbatches: int = 2,
) -> Measured:
    """Runs ``update`` of a recipe with a ``FakeDataset`` on equal microbatches of about ``size``.

    The first call also creates the optimizer's state, so its peak differs.
    """
    microbatch = microbatch_of(recipe.loader, size)
    totals = {name: num_microbatches * number for name, number in microbatch.counts.items()}
    step = UpdateStep(0, (microbatch,) * num_microbatches, totals, recipe.ranks.dp_degree)
    gc.collect()
    live.peak, live.flops = live.now, 0
    with mode or nullcontext(), live:
        recipe.update(step)
    counts = microbatch.counts
    return Measured(
        counts.get("positions") or counts["images"], live.peak, live.flops // num_microbatches
    )


def microbatch_of(loader: Any, size: int) -> Microbatch:
    """Returns a microbatch of about ``size`` positions and at least one sample, or of ``size`` images."""
    collator, dataset, made = loader.collator, loader.dataset, loader.dataset.dataset
    if "images" in collator.counts:
        images = [dataset[StepIndex(i, position=i, step_size=size)] for i in range(size)]
        return collator.collate(images)
    length = made.length
    if loader.settings.is_packed:
        made.length = max(length, min(size // _MOST_DOCUMENTS, collator.limits.max_seq_len))
    sample, made.length = dataset[0], length
    of_one = collator.collate([sample]).counts["positions"]
    return collator.collate([sample] * max(size // of_one, 1))


def shares_of(recipe: Any, live: LiveBytes) -> dict[str, int]:
    """Returns bytes after an update step by purpose; gradients are freed by then."""
    parameters, parts = [*recipe.model.parameters()], {}
    states = (s for each in single_optimizers(recipe.optimizer) for s in each.state.values())
    found = {
        "weights": [*parameters, *recipe.model.buffers()],
        "optimizer": [value for state in states for value in state.values()],
    }
    for name, tensors in found.items():
        storages = LiveBytes()
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storages.hold(tensor)
        parts[name] = storages.now
    parts["frozen models and tables"] = live.now - sum(parts.values())
    return parts | {"gradients": sum(local(p).nbytes for p in parameters if p.requires_grad)}


def largest_that_fits(
    run: Callable[[int], Measured], points: Sequence[Measured], limit: int, most: int, multiple: int
) -> Measured | None:
    """Returns the largest microbatch, at most ``most``, whose peak is within ``limit``; None if none is.

    Candidates lie on the line through the latest two points. Each is run, because chunks of a loss bend the line.
    """
    points = list(points)
    fits = [each for each in points if each.peak <= limit and each.size <= most]
    for _ in range(4):
        below, above = sorted(points[-2:])
        per_unit = max(above.peak - below.peak, 1) / max(above.size - below.size, 1)
        size = int(above.size + (limit - above.peak) / per_unit) // multiple * multiple
        size = min(max(size, multiple), most)
        if any(size == each.size for each in points):
            break
        points.append(found := run(size))
        fits += [found] * (found.peak <= limit)
        if 0.97 * limit < found.peak <= limit:
            break
    return max(fits, default=None)
