"""Weights of named datasets in the loss: of each target, or of each dataset's mean.

Datasets a and b with ``loss_weight`` 1 and 2 have 6 and 4 targets in an update step. A target of b has the weight 2, so
the loss is divided by 6 + 8. With ``loss_weights: datasets`` the means of a and b count 1/3 and 2/3: targets weigh
14 / (6 * 3) and 14 * 2 / (4 * 3), whose sum is 14 again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.components import component_at
from recipe_utils.settings.problems import Problem
from recipe_utils.text.mixture import Mixture, refused_weights
from recipe_utils.training.settings import TextComponents
from recipe_utils.update_steps.step import Microbatch, UpdateStep


def problems_of_weights(loss_weights: str, components: TextComponents, loss: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields weights that are wrong, or have no effect with the recipe's datasets or loss.

    ``loss_weights`` is the config key: what the ``loss_weight`` of a named dataset weighs.
    """
    yield from refused_weights("validation has no weights; remove it", dataset_val=components.dataset_val)
    text, component = "", str(loss.get("_component_"))
    with suppress(ValueError):  # another problem
        if "weights" not in getattr(component_at(component), "columns", ()):
            instead = "set loss._component_ to recipe_utils.losses.LinearCrossEntropyLoss"
            text = f"{component} cannot weight targets; {instead}"
    yield from refused_weights(text, dataset=components.dataset)
    entries = components.dataset if isinstance(components.dataset, list) else []
    if not any({"name", "weight", "loss_weight"} & entry.keys() for entry in entries):
        text = "it has no effect without named datasets; set dataset to a list with names"
    if text and loss_weights != "tokens":
        yield Problem("loss_weights", text, loss_weights)


@contextmanager
def mean_of_datasets(mixture: Mixture, ranks: Ranks, step: UpdateStep) -> Iterator[Sequence[Microbatch]]:
    """Yields microbatches whose weights make the loss a weighted mean of the datasets' means; validation has none.

    An :data:`.Attached` once mixture and ranks are given. All ranks together.
    """
    if not torch.is_grad_enabled():
        yield step.microbatches
        return
    datasets = [mixture.of_targets(microbatch.targets) for microbatch in step.microbatches]
    weights = [microbatch.targets.values["weights"].numpy() for microbatch in step.microbatches]
    given = np.array(mixture.loss_weights)
    sums = np.bincount(np.concatenate(datasets), np.concatenate(weights), minlength=len(given))
    sums = np.sum(gather_objects(sums, ranks.cpu_group), axis=0)  # with loss_weight, as often for each stage
    share = given * (sums > 0)
    factors = np.divide(share * sums.sum(), sums * share.sum(), where=sums > 0, out=np.zeros(len(given)))
    made = []
    for microbatch, which, of_targets in zip(step.microbatches, datasets, weights, strict=True):
        values = {**microbatch.targets.values, "weights": torch.from_numpy(of_targets * factors[which])}
        targets = microbatch.targets._replace(values=values, defaults=microbatch.targets.defaults - {"weights"})
        made.append(replace(microbatch, targets=targets))
    yield made
