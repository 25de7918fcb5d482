"""Lists of named datasets: checks of their entries, and their weights in the loss.

Datasets a and b with ``loss_weight`` 1 and 2 have 6 and 4 targets in an update step. A target of b has the weight 2, so
the loss is divided by 6 + 8. With ``loss_weights: datasets`` the means of a and b count 1/3 and 2/3: targets weigh
14 / (6 * 3) and 14 * 2 / (4 * 3), whose sum is 14 again.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import torch

from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.components import component_at, split_entry
from recipe_utils.settings.problems import Problem
from recipe_utils.text.mixture import Mixture, entries_of
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import Microbatch, UpdateStep


def problems_of_weights(
    loss_weights: str, dataset: Any, dataset_val: Any, loss: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yields weights that are wrong, or have no effect with the recipe's datasets or loss.

    ``loss_weights`` is the config key: what the ``loss_weight`` of a named dataset weighs.
    """
    yield from refused_weights("validation has no weights; remove it", dataset_val=dataset_val)
    text, component = "", str(loss.get("_component_"))
    with suppress(ValueError):  # another problem
        if "weights" not in getattr(component_at(component), "columns", ()):
            instead = "set loss._component_ to recipe_utils.losses.LinearCrossEntropyLoss"
            text = f"{component} cannot weight targets; {instead}"
    yield from refused_weights(text, dataset=dataset)
    entries = dataset if isinstance(dataset, list) else []
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


# ---- Checks of entries ----------------------------------------------------------------------------


def problems_with_datasets(data: DataSettings, dataset: Any, dataset_val: Any) -> Iterator[Problem]:
    """Yields problems of lists of datasets, and of a ``mixture`` without one that has weights."""
    yield from problems_with_list("dataset", dataset)
    yield from problems_with_list("dataset_val", dataset_val)
    if data.mixture and not (isinstance(dataset, list) and any("weight" in entry for entry in dataset)):
        yield Problem("mixture", "it has no effect without a list of weights; set dataset")


def problems_with_list(key: str, datasets: Any) -> Iterator[Problem]:
    """Yields problems of the keys of a list of datasets."""
    datasets = datasets if isinstance(datasets, list) else []
    entries = entries_of(datasets)
    number = sum("weight" in entry for entry in entries)
    if number and key != "dataset":
        yield Problem(key, "validation takes each sample once; take the weights out")
    elif 0 < number < len(entries):
        yield Problem(key, f"{number} of {len(entries)} datasets have a weight; give all of them one, or none")
    # Metrics and samples are named by the dataset.
    is_mixture = any(split_entry(dataset)[1] for dataset in datasets)
    for name, number in Counter(str(entry["name"]) for entry in entries).items():
        if number > 1 and is_mixture:
            yield Problem(key, f"{number} of its datasets are called {name}; give each a name")
    for index, entry in enumerate(entries):
        weight, name = entry.get("weight", 1), entry["name"]
        if type(weight) not in (int, float) or not 0 < weight < inf:
            text = "it must be a number above 0; or take the dataset out"
            shown = repr(weight) if isinstance(weight, str) else weight
            yield Problem(f"{key}.{index}.weight", text, shown)
        if is_mixture and not (isinstance(name, str) and re.fullmatch(r"[^\s/]+", name)):
            text = "metrics are named by it: set it to a word without / and spaces"
            yield Problem(f"{key}.{index}.name", text, repr(name))


def refused_weights(text: str = "this recipe weights no datasets; remove it", **datasets: Any) -> Iterator[Problem]:
    """Yields each ``loss_weight`` that is wrong, in entries of datasets by config key.

    With ``text``, the reason why weights have no effect, any but 1 is wrong.
    """
    for key, entries in datasets.items():
        for index, entry in enumerate(entries if isinstance(entries, list) else []):
            weight = entry.get("loss_weight", 1)
            is_valid = type(weight) in (int, float) and 0 < weight < inf
            if not is_valid or (text and weight != 1):
                reason = text or "it must be a number above 0"
                yield Problem(f"{key}.{index}.loss_weight", reason, weight)
