"""Sums of an objective over a validation dataset."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from recipe_utils.models.pipeline.microbatches import Pipeline
from recipe_utils.parallel.to_device import to_device_ahead
from recipe_utils.update_steps.loader import UpdateStep, UpdateStepLoader
from recipe_utils.update_steps.step import Microbatch

Attached = Callable[[UpdateStep], AbstractContextManager[Sequence[Microbatch]]]


@torch.no_grad()
def sum_over(
    loader: UpdateStepLoader,
    model: nn.Module,
    sums: Callable[[Microbatch], Tensor],
    num_sums: int,
    pipeline: Pipeline | None,
    device: torch.device,
    attached: Attached = lambda step: nullcontext(step.microbatches),
) -> tuple[Tensor, Counter[str]]:
    """Returns this rank's sums over a loader in fp64, and its totals over all ranks.

    The sums are ``num_sums``, and those of each named dataset if losses are recorded by sample.
    ``sums`` maps a microbatch to its sums; with a ``pipeline`` they are those of its last stage.
    ``attached`` maps an update step to its microbatches with the outputs of a frozen model.
    """
    model.eval()
    total = torch.zeros(num_sums, dtype=torch.float64, device=device)
    of_datasets: Tensor | float = 0.0
    totals: Counter[str] = Counter()
    with loader.epoch(0) as steps:
        for step in steps:
            with attached(step) as microbatches:
                if pipeline is not None:
                    total += pipeline.forward(microbatches)
                else:
                    for microbatch in to_device_ahead(microbatches, device):
                        total += sums(microbatch)
            of_datasets = of_datasets + step.sums_by_dataset(loader.ranks)
            totals.update(step.totals)
    model.train()
    return torch.cat([total, torch.as_tensor(of_datasets).view(-1)]), totals
