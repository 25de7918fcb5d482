"""Sums of an objective over a validation dataset."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from recipe_utils.losses.by_sample import LossesBySample
from recipe_utils.models.pipeline.microbatches import Pipeline
from recipe_utils.parallel.to_device import to_device_ahead
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.step import Microbatch, UpdateStep

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
    by_sample: LossesBySample | None = None,
) -> tuple[Tensor, Counter[str]]:
    """Returns this rank's sums over a loader in fp64, and its totals over all ranks.

    The sums are ``num_sums``, and with ``by_sample`` those of each named dataset.
    ``sums`` maps a microbatch to its sums; with a ``pipeline`` they are those of its last stage.
    ``attached`` maps an update step to its microbatches with the outputs of a frozen model.
    """
    model.eval()
    total = torch.zeros(num_sums, dtype=torch.float64, device=device)
    of_datasets = torch.zeros((), dtype=torch.float64, device=device)
    totals: Counter[str] = Counter()
    with loader.epoch(0) as steps:
        for step in steps:
            if by_sample is not None:
                by_sample.start(step, loader, 0, weighs=False)
            with attached(step) as microbatches:
                if pipeline is not None:
                    total += pipeline.forward(microbatches)
                else:
                    for microbatch in to_device_ahead(microbatches, device):
                        total += sums(microbatch)
            if by_sample is not None:
                of_datasets = of_datasets + by_sample.by_dataset()
            totals.update(step.totals)
    model.train()
    return torch.cat([total, of_datasets.view(-1)]) if by_sample is not None else total, totals
