"""Whether updates reach the weights: the share of them that some update steps have changed.

Weights of bf16 have 8 bits, so an update below 1/512 of its weight may be rounded away, each time anew. No loss says
so: the large updates still arrive.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchtune.utils import get_logger, log_rank_zero

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.data.loader.to_host import Late, ToHost
from recipe_utils.optim.optimizer import OptimizerInBackward, single_optimizers
from recipe_utils.parallel.process_group import mean_over_ranks

_log = get_logger("INFO")

NUM_STEPS = 20
"""Update steps of a probe, unless its epoch has fewer."""
NUM_SAMPLED = 1 << 16
"""Elements that a rank keeps a copy of."""


class WeightsMoved:
    """Compares a sample of the trained weights with a copy from some update steps before, once an epoch.

    Counted are elements whose gradient in the first of these steps was finite and not zero: rows of embeddings
    whose token does not occur stay where they are in any precision. A probe begins once the learning rate is
    above zero and rises no more, so that a warm-up is not taken for rounding; update steps that were left out
    as not finite are no steps of it. In between nothing is read: it costs a copy at its begin and one at its end.

    Args:
        optimizer: of the trained weights; also one that steps in the backward.
        device: of the ranks' collectives.
    """

    def __init__(self, optimizer: Optimizer | OptimizerInBackward, device: torch.device) -> None:
        self._device = device
        self._last_index = -1
        self._has_warned = False
        optimizers = single_optimizers(optimizer)
        num_elements = sum(_local(p).numel() for each in optimizers for p in _trained(each))
        # Odd, or it would meet the same few columns of every matrix.
        self._stride = -(-num_elements // NUM_SAMPLED) | 1
        self._probes = []
        start = 0
        for each in optimizers:
            self._probes.append(_Probe(each, self._stride, start))
            start += sum(_local(p).numel() for p in _trained(each))

    def read(self, step: UpdateStep) -> dict[str, Late]:
        """``weights_moved_fraction`` after ``step``, to be read later, if a probe has come to its end; else nothing.

        All ranks together, where metrics are logged. Warns once, when it is read, if less than half of bf16's
        weights have moved.
        """
        if step.index <= self._last_index:  # of another epoch
            self._drop_probes(wants_others=True)
        self._last_index = step.index
        num_steps = max((probe.num_steps for probe in self._probes), default=0)
        is_due = num_steps >= NUM_STEPS or (step.is_last_of_epoch and num_steps > 0)
        found: dict[str, Late] = {}
        if is_due:
            found = {"weights_moved_fraction": self._compare()}
            self._drop_probes(wants_others=False)
        if step.is_last_of_epoch:
            self._last_index = -1
            self._drop_probes(wants_others=True)
        return found

    def _drop_probes(self, wants_others: bool) -> None:
        for probe in self._probes:
            probe.drop(wants_another=wants_others)

    def _compare(self) -> "_Moved":
        # Of each element that is sampled there are as many as the stride.
        counts = self._stride * sum(
            (probe.counts().to(self._device) for probe in self._probes),
            start=torch.zeros(3, dtype=torch.float64, device=self._device),
        )
        return _Moved(
            counts=ToHost(mean_over_ranks(counts)),
            steps=[(probe.num_steps, probe.num_left_out()) for probe in self._probes],
            lr=max(probe.lr for probe in self._probes),
            warn=self._warn,
        )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            log_rank_zero(_log, text, level=logging.WARNING)
        self._has_warned = True


class _Moved(NamedTuple):
    """What a probe has found."""

    counts: ToHost
    """Elements that have moved, are counted, and are counted and of bf16, [3]."""
    steps: list[tuple[int, ToHost | None]]
    """Of each optimizer since its copy was made, and of them those that were left out."""
    lr: float
    warn: Callable[[str], None]

    def read(self) -> float | None:
        """See :class:`recipe_utils.data.loader.to_host.Late`."""
        num_moved, num_counted, num_in_bf16 = self.counts.read().tolist()
        num_steps = max(
            num_steps - (int(left_out.read()) if left_out is not None else 0)
            for num_steps, left_out in self.steps
        )
        if num_counted == 0 or num_steps == 0:
            return None
        fraction: float = num_moved / num_counted
        if fraction < 0.5 and num_in_bf16 > 0:
            self.warn(
                f"dtype=bf16: {fraction:.0%} of the trained weights have changed in {num_steps} update steps; bf16 "
                f"rounds updates away that are small beside their weight (lr={self.lr:g}); set weights_dtype=fp32"
            )
        return fraction


class _Part(NamedTuple):
    """Of one parameter."""

    parameter: nn.Parameter
    start: int
    weights: Tensor
    had_gradient: Tensor


class _Probe:
    """A sample of one optimizer's parameters, from before one of its steps."""

    def __init__(self, optimizer: Optimizer, stride: int, start: int) -> None:
        self.num_steps = 0  # since the copy was made; 0 without one
        self.lr = 0.0  # of the last step
        self._is_wanted = True
        self._parts: list[_Part] = []
        self._has_stepped = False
        self._num_left_out: Tensor | int = 0
        self._stride = stride
        self._start = start  # of its parameters among those of all optimizers
        optimizer.register_step_pre_hook(self._before_step)

    def drop(self, wants_another: bool) -> None:
        """Forgets the copy; the next step that may begin a probe does so if another is wanted."""
        self.num_steps, self._parts, self._is_wanted = 0, [], wants_another

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A learning rate on the device is not looked at.
        rates = [g["lr"] for g in optimizer.param_groups if not isinstance(g["lr"], Tensor)]
        lr = max(rates, default=1.0)
        rises = self._has_stepped and lr > self.lr
        self.lr, self._has_stepped = lr, True
        if self.num_steps > 0 and rises:
            self.drop(wants_another=True)
        elif self.num_steps == 0 and self._is_wanted and lr > 0 and not rises:
            self._begin(optimizer)
        if self._parts:
            self.num_steps += 1
            self._num_left_out = self._num_left_out + getattr(optimizer, "found_inf", 0)

    @torch.no_grad()
    def _begin(self, optimizer: Optimizer) -> None:
        self._num_left_out = 0
        offset = self._start
        for parameter in _trained(optimizer):
            local = _local(parameter)
            start = -offset % self._stride
            offset += local.numel()
            if parameter.grad is None:
                continue
            gradient = self._sample(_local(_placed_as(parameter.grad, parameter)), start)
            had_gradient = (gradient != 0) & gradient.isfinite()
            weights = self._sample(local, start).clone()
            self._parts.append(_Part(parameter, start, weights, had_gradient))

    def num_left_out(self) -> ToHost | None:
        """Of the steps, those that have not reached the weights; None where there can be none."""
        left_out = self._num_left_out
        return ToHost(left_out) if isinstance(left_out, Tensor) else None

    @torch.no_grad()
    def counts(self) -> Tensor:
        """How many elements have moved, are counted, and are counted and of bf16, [3]."""
        counts = []
        for parameter, start, weights, had_gradient in self._parts:
            moved = (self._sample(_local(parameter), start) != weights) & had_gradient
            num_counted = had_gradient.sum()
            is_bf16 = weights.dtype == torch.bfloat16
            counts.append(torch.stack([moved.sum(), num_counted, num_counted * is_bf16]))
        if not counts:
            return torch.zeros(3, dtype=torch.float64)
        return torch.stack(counts).sum(0).double()

    def _sample(self, tensor: Tensor, start: int) -> Tensor:
        return tensor.detach().reshape(-1)[start :: self._stride]


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _placed_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Tensor parallel leaves the gradient of an embedding whole that is split over the ranks."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    placed: Tensor = gradient.redistribute(placements=parameter.placements)
    return placed


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
