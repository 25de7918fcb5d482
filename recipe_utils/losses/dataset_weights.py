"""Weights of named datasets in the loss, and the loss of each of them."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from recipe_utils.settings.components import component_at
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import Problem
from recipe_utils.text.collator import OF_DATASET
from recipe_utils.update_steps.settings import DataSettings


@dataclass(frozen=True, config=STRICT)
class LossWeightSettings:
    """Weights of named datasets in the loss."""

    loss_weights: Literal["tokens", "datasets"] = "tokens"
    """What the ``loss_weight`` of a named dataset weighs in an update step. ``tokens``: each target token;
    ``datasets``: the dataset's mean loss. The loss is divided by the sum of weights."""

    def problems_of_weights(self, dataset: Any, dataset_val: Any, loss: Mapping[str, Any]) -> Iterator[Problem]:
        """Yields weights that are wrong, or have no effect with the recipe's datasets or loss."""
        yield from refused_weights("validation has no weights; remove it", dataset_val=dataset_val)
        text = ""
        if not _has(loss, "weights"):
            text = (
                f"{loss.get('_component_')} cannot weight targets; set loss._component_ to "
                "recipe_utils.losses.LinearCrossEntropyLoss"
            )
        yield from refused_weights(text, dataset=dataset)
        entries = dataset if isinstance(dataset, list) else []
        if not any({"name", "weight", "loss_weight"} & part.keys() for part in entries):
            text = "it has no effect without named datasets; set dataset to a list with names"
        if text and self.loss_weights != "tokens":
            yield Problem("loss_weights", text, self.loss_weights)

    def weigh(self, weights: Sequence[float], counts: Sequence[float]) -> Tensor:
        """Returns the factor of a target's loss by dataset [k], fp64, 1 on average over all targets.

        The weighted sum of losses over the number of targets is then the loss of the update step.
        ``counts`` are target tokens over all ranks; without any, factors are 0.
        """
        number, given = torch.tensor([counts, weights], dtype=torch.float64)
        if self.loss_weights == "datasets":
            given = torch.where(number > 0, given / number, 0)
        return given * (number.sum() / (given * number).sum().clamp(min=1e-300))


def problems_with_sample_losses(data: DataSettings, loss: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields ``sample_losses`` of a loss that does not sum by sample."""
    if data.sample_losses and not _has(loss, "record"):
        text = (
            f"{loss.get('_component_')} does not sum by sample; set loss._component_ to "
            "recipe_utils.losses.LinearCrossEntropyLoss"
        )
        yield Problem("sample_losses", text, True)


def _has(loss: Mapping[str, Any], attribute: str) -> bool:
    """Returns True if a loss component has it, or if there is none of its name, which is another problem."""
    try:
        return hasattr(component_at(str(loss.get("_component_"))), attribute)
    except ValueError:
        return True


def refused_weights(text: str = "this recipe weights no datasets; remove it", **datasets: Any) -> Iterator[Problem]:
    """Yields each ``loss_weight`` that is wrong, in entries of datasets by config key.

    With ``text``, the reason why weights have no effect, any but 1 is wrong.
    """
    for key, entries in datasets.items():
        for index, part in enumerate(entries if isinstance(entries, list) else []):
            weight = part.get("loss_weight", 1)
            is_valid = type(weight) in (int, float) and 0 < weight < inf
            if not is_valid or (text and weight != 1):
                reason = text or "it must be a number above 0"
                yield Problem(f"{key}.{index}.loss_weight", reason, weight)


def token_shares(totals: Mapping[str, float]) -> dict[str, float]:
    """Returns the fraction of the target tokens of each named dataset, as ``token_share/NAME``."""
    return {
        f"token_share/{name.removeprefix(OF_DATASET)}": number / totals["target_tokens"]
        for name, number in totals.items()
        if name.startswith(OF_DATASET)
    }


def losses_by_dataset(sums: Tensor, totals: Mapping[str, float], prefix: str = "") -> dict[str, Tensor]:
    """Returns sums [k] of named datasets with targets as ``loss/NAME``, times N / n of ``totals``.

    Divided by all N target tokens, they are means over the dataset's n.
    """
    names = [name for name in totals if name.startswith(OF_DATASET)]
    return {
        f"{prefix}loss/{name.removeprefix(OF_DATASET)}": part * totals["target_tokens"] / totals[name]
        for name, part in zip(names, sums, strict=False)
        if totals[name]
    }
