"""Fraction of the trained weights that update steps change: bf16 rounds small updates away."""

import logging
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchtune.utils import get_logger, log_rank_zero

from recipe_utils.optim.optimizer import OptimizerInBackward, single_optimizers
from recipe_utils.parallel.fsdp import local
from recipe_utils.parallel.process_group import mean_over_ranks

NUM_STEPS = 20  # update steps between the snapshots, unless the epoch has fewer
NUM_SAMPLED = 1 << 16  # elements per rank that are compared


class ChangedWeights:
    """Compares two snapshots of a sample of the weights, once per epoch and not in a warm-up.

    Counts elements with a finite gradient other than zero: embeddings of absent tokens have none.
    """

    def __init__(self, optimizer: Optimizer | OptimizerInBackward) -> None:
        self._groups, self._has_warned = optimizer.param_groups, False
        num_elements = sum(local(p).numel() for group in self._groups for p in group["params"])
        self._stride = -(-num_elements // NUM_SAMPLED) | 1  # odd: not always the same columns
        self.restart()
        for each in single_optimizers(optimizer):
            each.register_step_pre_hook(self._before_step)

    def restart(self, is_done: bool = False) -> None:
        """Starts an epoch."""
        self._is_done, self._num_steps, self._lr = is_done, 0, 0.0
        self._first: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def _rate(self) -> float:
        lr = self._groups[0]["lr"]
        return 1.0 if lr is None else float(lr)  # Adafactor finds its rate

    def _sample(self, tensor: Tensor) -> Tensor:
        return local(tensor).flatten()[:: self._stride]

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_steps += optimizer.param_groups[0] is self._groups[0]
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is None or p in self._first or self._is_done:
                continue
            # Tensor parallelism does not shard the gradient of embeddings.
            is_sharded = isinstance(p, DTensor)
            gradient = p.grad.redistribute(placements=p.placements) if is_sharded else p.grad
            sample = self._sample(gradient)
            is_skipped = getattr(optimizer, "found_inf", torch.zeros(1)).to(sample.device) > 0
            counted = (sample != 0) & sample.isfinite() & ~is_skipped
            self._first[p] = self._sample(p).clone(), counted
            self._num_steps, self._lr = 1, self._rate()

    @torch.no_grad()
    def fraction(self, is_last_of_epoch: bool) -> float | None:
        """Returns the fraction over all ranks if it is due. Warns once if bf16 keeps it below 0.5."""
        if self._is_done or self._num_steps < (1 if is_last_of_epoch else NUM_STEPS):
            return None
        counts = torch.zeros(2, dtype=torch.float64)
        for p, (before, counted) in self._first.items():
            changed = (self._sample(p) != before) & counted
            counts += torch.stack([changed.sum(), counted.sum()]).cpu() * self._stride
        num_changed, num_counted = mean_over_ranks(counts).tolist()
        fraction, steps, lr = num_changed / max(num_counted, 1), self._num_steps, self._lr
        is_bf16 = any(p.dtype == torch.bfloat16 for p in self._first)
        self.restart(is_done=lr > 0 and self._rate() <= lr)
        if num_counted == 0 or not self._is_done:
            return None
        if fraction < 0.5 and is_bf16 and not self._has_warned:
            self._has_warned = True
            text = (
                f"dtype=bf16: {fraction:.0%} of the trained weights have changed in {steps} update "
                f"steps; bf16 rounds small updates away ({lr=:g}); set weights_dtype=fp32"
            )
            log_rank_zero(get_logger("INFO"), text, logging.WARNING)
        return fraction
