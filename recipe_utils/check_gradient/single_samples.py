"""Update step of single samples: what a recipe's own ``update`` computes without a layout.

Update step 2 has samples of 5, 3, 9 and 2 tokens, which the recipe packs into two rows on two ranks. Here the same
recipe has one process and four padded microbatches of one sample each, the weights that update step 1 has made, and
totals that are counted over these four: 15 targets.

Both sides run the same ``update``, so a wrong factor in it is on both. It is seen in what arrives at ``sums`` in the
backward, 0.0667 for 15 targets; a wrong sign of a frozen model's term in how the gradient changes with that model.
"""

import logging
import os
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from math import isclose
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from recipe_utils.models.adapters.adapted_linear import forget_norms
from recipe_utils.models.frozen import FrozenModel
from recipe_utils.models.runner import Whole
from recipe_utils.models.weights import gather_weights
from recipe_utils.optim.optimizer import single_optimizers
from recipe_utils.parallel.fsdp import local, reshard
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.update_steps.step import Microbatch, UpdateStep

Weights = Mapping[str, Tensor]
"""Whole weights or gradients on the CPU, by exported names."""
_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class Recorded(NamedTuple):
    """Gradient of an update step in the layout of the config, and all weights before and after update step 1."""

    start: Weights
    moved: Weights
    gradients: Weights
    step: UpdateStep


class _Asked(dict[str, float]):
    """Totals that keep those that are read in :attr:`asked`."""

    def __init__(self, totals: Mapping[str, float]) -> None:
        super().__init__(totals)
        self.asked = dict[str, float]()

    def __getitem__(self, name: str) -> float:
        return self.asked.setdefault(name, super().__getitem__(name))


class SingleSamples:
    """Gradient of an update step of a recipe with a config of single samples, in one process of those of a launcher.

    With ``judges``, also lists what is ``wrong`` beside the gradient, and what is ``not_judged``.
    """

    def __init__(self, recipe_class: Any, cfg: DictConfig, recorded: Recorded, judges: bool = False) -> None:
        self._recorded, self._frozen = recorded, dict[FrozenModel, None]()
        self.wrong, self.not_judged = list[str](), list[str]()
        hidden = {name: os.environ.pop(name) for name in _LAUNCHER & os.environ.keys()}
        with ExitStack() as stack:
            stack.callback(os.environ.update, hidden)
            stack.callback(logging.disable, logging.NOTSET)
            logging.disable(logging.WARNING)  # what setup logs again
            self._recipe = recipe = recipe_class(cfg)
            stack.enter_context(recipe.run)
            recipe.setup(cfg)
            recipe.model.module.eval()
            for optimizer in single_optimizers(recipe.stepper.optimizer):
                vars(optimizer)["records"] = True
            with recipe.loader.epoch(0) as steps:
                step = next(step for step in steps if step.index == recorded.step.index)
            totals = Counter[str]()
            for microbatch in step.microbatches:
                totals.update(microbatch.counts)
            self._step = replace(step, totals=_Asked({**step.totals, **totals}))
            self.gradients = self._gradients()
            if judges:
                self._judge(self._step.totals.asked)

    def _gradients(self) -> Weights:
        """Returns the gradient of each trained parameter after update step 1."""
        recipe, self._sums, outputs = self._recipe, list[tuple[Tensor, Tensor]](), FrozenModel.outputs

        def sums_of(microbatch: Microbatch) -> Any:
            sums = Whole.sums(recipe.model, microbatch)
            if isinstance(sums, Tensor) and sums.requires_grad:
                values = sums.detach().flatten().double()
                sums.register_hook(lambda factors: self._sums.append((values, factors.flatten().double())))
            return sums

        def outputs_of(frozen: FrozenModel, microbatches: Any) -> Any:
            self._frozen[frozen] = None
            return outputs(frozen, microbatches)

        recipe.model.sums = sums_of
        place(recipe.model.module, self._recorded.moved)
        with patch.object(FrozenModel, "outputs", outputs_of):
            self._metrics, _ = recipe.update(self._step)
        return gathered(recipe.model.module, recipe.ranks, self._recorded.gradients)

    def _judge(self, asked: Mapping[str, float]) -> None:
        """Fills :attr:`wrong` and :attr:`not_judged`; ``asked`` are the totals that ``update`` has read."""
        for name, total in asked.items():
            if not isclose(theirs := self._recorded.step.totals.get(name, 0), total):
                self.wrong.append(f"totals: {name} is {theirs}, single samples have {total}")
        found, expected = len(self._sums), len(self._step.microbatches)
        if found == expected:
            self._judge_scale(asked)
        else:
            text = f"update: {found} of {expected} samples have a backward of sums(microbatch)"
            (self.wrong if found else self.not_judged).append(text)
        for frozen in self._frozen:
            self._judge_sign(frozen)
        if any("document_lengths" in microbatch.inputs for microbatch in self._step.microbatches):
            self.not_judged.append("what keeps the documents of one packed sample apart")
        if zero := [name for name, gradient in self.gradients.items() if not gradient.any()]:
            text = f"{len(zero)} of {len(self.gradients)} parameters have no gradient: {', '.join(zero[:4])}"
            (self.not_judged if len(zero) < len(self.gradients) else self.wrong).append(text)

    def _judge_scale(self, asked: Mapping[str, float]) -> None:
        """Finds sums that are not divided by a total.

        DPO's sums over 2 pairs with 15 chosen targets arrive with factors 0.5 and, for a weight of 0.3 of the last
        one, 0.02 = 0.3 / 15. Such a weight is right if a metric is the mean over 15; that of the first sum, which is
        the loss, if another metric is the whole that is differentiated. For 0.49 neither is.
        """
        sums, factors = (torch.stack(each) for each in zip(*self._sums, strict=True))
        whole, logged = (sums * factors).sum().item(), [float(metric) for metric in self._metrics.values()]
        for number, (values, by) in enumerate(zip(sums.T, factors.T, strict=True), 1):
            factor, mean_is_logged = by.mean().item(), number > 1 or _is_in(whole, logged)
            mean_is_logged &= any(_is_in(values.sum().item() / (total or 1), logged) for total in asked.values())
            if (by - factor).abs().max() > 1e-4 * abs(factor):
                self.not_judged.append(f"the scale of sum {number}, whose factor differs by microbatch")
            elif factor and not mean_is_logged and not _is_in(1, [factor * total for total in asked.values()]):
                given = " or ".join(f"{factor * total:.6g} / {name}" for name, total in asked.items())
                self.wrong.append(f"scale: sum {number} is multiplied by {given}, and no metric tells that weight")

    def _judge_sign(self, frozen: FrozenModel) -> None:
        """Finds a frozen model that the gradient pushes the weights away from.

        Let g(r) be the gradient if the frozen model has weights r, and update step 1 a step from s to w. A divergence
        has no gradient in g(w), and that in g(s) has it grow from s to w: (g(s) - g(w)) (w - s) > 0.
        """
        start, moved = self._recorded.start, self._recorded.moved
        shapes = {name: weight.shape for name, weight in frozen.model.module.state_dict().items()}
        text, along = "", 0.0
        # The inequality holds for divergences between models of the same weights only.
        if "pairs" in self._step.totals or not frozen.attracts:
            text = f": {'a margin of pairs' if frozen.attracts else 'a ratio'} is no divergence"
        elif any(shapes.get(name) != start[name].shape for name in self.gradients):
            text = ", a model of other weights than the trained one"
        else:
            is_copy, change, norm = frozen.model is not self._recipe.model, 0.0, 0.0
            at_start = self._gradients_beside(frozen, start) if is_copy else self.gradients
            for name, gradient in self._gradients_beside(frozen, moved).items():
                difference = at_start[name].double() - gradient
                change += difference.square().sum().item()
                norm += gradient.double().square().sum().item()
                along += (difference * (moved[name].double() - start[name])).sum().item()
            # Rounding of fp64: there is no difference whose sign could be judged.
            if change <= 1e-14 * norm:
                text = ": it does not change the gradient, or is one of the trained weights themselves"
        if text:
            self.not_judged.append(f"the sign of the term of {frozen.name}{text}")
        elif along < 0:
            self.wrong.append(f"sign: the term of {frozen.name} pushes the weights away from that model")

    def _gradients_beside(self, frozen: FrozenModel, weights: Weights) -> Weights:
        """Returns gradients with ``weights`` in a frozen model; the trained one, which exchanges some, has its own."""
        frozen.during_forward = nullcontext
        if frozen.model is not self._recipe.model:
            place(frozen.model.module, weights)
        return self._gradients()


def gathered(model: nn.Module, ranks: Ranks, names: Collection[str] | None = None) -> Weights:
    """Returns copies of weights, all or those of ``names``, on rank 0. All ranks together."""
    weights = gather_weights(model, ranks.device, ranks.dp_rank == 0, ranks.cpu_group, names)
    return {name: weight.clone() for name, weight in weights.items()}


@torch.no_grad()
def place(model: nn.Module, weights: Weights) -> None:
    """Copies weights into a model of one process."""
    reshard(model)
    for name, weight in model.state_dict().items():
        local(weight).copy_(weights[name])
    forget_norms(model)


def _is_in(value: float, found: list[float]) -> bool:
    return any(isclose(value, each, rel_tol=1e-4) for each in found)
