"""Simulates a device that runs out of memory: rows above some length raise torch.OutOfMemoryError."""

import os

import torch

from recipe_utils.loss.linear_cross_entropy import LinearCrossEntropyLoss

num_failed = 0


class LimitedLoss(LinearCrossEntropyLoss):
    """Fails in the forward of training on one rank, after ``skip`` such rows."""

    def __init__(self, most, rank=0, skip=0):
        super().__init__()
        self.most, self.rank, self.skip = most, rank, skip

    def forward(self, output, hidden, *args, **kwargs):
        global num_failed
        is_row = hidden.shape[:-1].numel() > self.most and torch.is_grad_enabled()
        if is_row and int(os.environ.get("RANK", 0)) == self.rank:
            if self.skip == 0:
                num_failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
            self.skip -= 1
        return super().forward(output, hidden, *args, **kwargs)


class FailingSGD(torch.optim.SGD):
    """Runs out of memory in its sixth step, after it has changed a parameter."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps == 6:
            self.param_groups[0]["params"][0].add_(1)
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return super().step(closure)
