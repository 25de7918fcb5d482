"""Schedules besides the learning rate: functions of the update step, so nothing is saved."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from torch.optim import Optimizer

from recipe_utils.optim.optimizer import takes_names
from recipe_utils.settings.keys import STRICT, CountOrZero, Positive
from recipe_utils.settings.problems import Problem
from recipe_utils.torchtune_names import log_rank_zero

_Momentum = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class ScheduleSettings:
    """Schedules over update steps, besides the learning rate."""

    ema_momentum: _Momentum = 0.994
    """Momentum of the moving average, per update step."""
    ema_momentum_end: _Momentum | None = None
    """Momentum at the end of training (half a cosine); null keeps it constant."""
    teacher_temperature: Positive = 0.07
    """Temperature of the teacher's logits; must be below the student's."""
    teacher_temperature_start: Positive | None = None
    """Initial temperature, which changes linearly; null is ``teacher_temperature``."""
    teacher_temperature_warmup_steps: CountOrZero = 0
    """Update steps until ``teacher_temperature`` is reached."""
    weight_decay_end: Annotated[float, Field(ge=0)] | None = None
    """Weight decay at the end of training (half a cosine); null keeps it constant."""
    freeze_last_layer_steps: CountOrZero = 0
    """Update steps in which the prototypes are frozen."""
    layerwise_lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Ratio of a layer's learning rate to that of the next deeper one."""

    def problems(self) -> Iterator[Problem]:
        """Yields problems between the keys."""
        start, warmup = self.teacher_temperature_start, self.teacher_temperature_warmup_steps
        if (start is None) != (warmup == 0):
            other = "teacher_temperature_start"
            shown = "null" if start is None else start
            text = f"with {other}={shown} it has no effect; set both or neither"
            yield Problem("teacher_temperature_warmup_steps", text, warmup)

        if self.ema_momentum == 1 and self.ema_momentum_end in (None, 1):
            text = "the average, which is exported, would never move; set it below 1"
            yield Problem("ema_momentum", text, self.ema_momentum)

    def problems_of_schedules(self, optimizer: Mapping[str, Any], student_temperature: float) -> Iterator[Problem]:
        """Yields schedules that do not fit the config of the optimizer, or the student's temperature."""
        if takes_names(optimizer):
            text = "rates and weight decay by depth need one optimizer; set torch.optim.AdamW"
            yield Problem("optimizer._component_", text, optimizer["_component_"])
        if self.weight_decay_end is not None and not optimizer.get("weight_decay"):
            text = "it starts from optimizer.weight_decay; set that above 0, or remove this key"
            yield Problem("weight_decay_end", text, self.weight_decay_end)
        for name in ("teacher_temperature", "teacher_temperature_start"):
            temperature = getattr(self, name)
            if temperature is not None and temperature >= student_temperature:
                text = (
                    f"{student_temperature=} must be above it, so that targets are sharper than "
                    "the student's outputs; set it lower"
                )
                yield Problem(name, text, temperature)

    def warn_if_longer_than(self, num_steps: int) -> None:
        """Warns of schedules that do not end within the training's update steps."""
        for name in ("freeze_last_layer_steps", "teacher_temperature_warmup_steps"):
            length = getattr(self, name)
            if length >= num_steps:
                log_rank_zero(f"{name}={length}: the training has only {num_steps} update steps", logging.WARNING)

    def temperature_at(self, global_step: int) -> float:
        """Returns the teacher's temperature after ``global_step`` update steps."""
        start, steps = self.teacher_temperature_start, self.teacher_temperature_warmup_steps
        if start is None or global_step >= steps:
            return self.teacher_temperature
        return start + (self.teacher_temperature - start) * global_step / steps

    def momentum_at(self, global_step: int, num_steps: int) -> float:
        """Returns the momentum of the moving average after ``global_step`` update steps."""
        return half_cosine(self.ema_momentum, self.ema_momentum_end, global_step, num_steps)

    def schedules_at(self, global_step: int, num_steps: int) -> dict[str, float]:
        """Returns momentum and temperature after ``global_step`` update steps, to be logged."""
        return {
            "ema_momentum": self.momentum_at(global_step, num_steps),
            "teacher_temperature": self.temperature_at(global_step),
        }

    def freeze_prototypes(self, model: nn.Module, global_step: int) -> None:
        """Drops gradients of prototypes in the first steps (arXiv:2104.14294, appendix C)."""
        if global_step < self.freeze_last_layer_steps:
            for name, parameter in model.named_parameters():
                if ".prototypes." in name:
                    parameter.grad = None

    def set_weight_decay(self, optimizer: Optimizer, global_step: int, num_steps: int) -> None:
        """Sets the weight decay of the groups that have one."""
        for group in optimizer.param_groups:
            if "decays_from" in group and group["decays_from"] > 0:
                group["weight_decay"] = half_cosine(group["decays_from"], self.weight_decay_end, global_step, num_steps)

    def groups_by_depth(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Mapping[str, Any],
        depth_of: Callable[[str], int],
        num_depths: int,
        decays_vectors: bool,
    ) -> list[dict[str, Any]]:
        """Returns parameter groups with learning rates by depth; vectors decay if ``decays_vectors``.

        Vectors are biases, norms and scales (arXiv:2104.14294). All ranks have the same groups, even
        empty ones. ``depth_of`` returns a parameter's depth below ``num_depths`` by its name; the
        deepest have the full learning rate. ``optimizer`` is its config.
        """
        decay = optimizer.get("weight_decay")
        deepest = num_depths - 1
        first = 0 if self.layerwise_lr_decay != 1 else deepest  # else one depth is enough
        groups: dict[tuple[int, bool], dict[str, Any]] = {}
        for depth, is_matrix in itertools.product(range(first, num_depths), (False, True)):
            group: dict[str, Any] = {"params": []}
            if "lr" in optimizer:
                group["lr"] = optimizer["lr"] * self.layerwise_lr_decay ** (deepest - depth)
            if decay is not None:
                decay_of_group = decay * (is_matrix or decays_vectors)
                group |= {"weight_decay": decay_of_group, "decays_from": decay_of_group}
            groups[depth, is_matrix] = group
        for name, parameter in parameters.items():
            depth = max(depth_of(name), first)
            groups[depth, parameter.dim() > 1]["params"].append(parameter)
        return list(groups.values())


def half_cosine(start: float, end: float | None, step: int, num_steps: int) -> float:
    """Returns a value from ``start`` at step 0 to ``end`` at ``num_steps``; None keeps ``start``."""
    if end is None:
        return start
    part = min(step / max(num_steps, 1), 1.0)
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2
