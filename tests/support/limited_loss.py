"""Simulates a device that runs out of memory: rows above some length raise torch.OutOfMemoryError."""

import torch

from recipe_utils.losses.cross_entropy import LinearCrossEntropyLoss


class LimitedLoss(LinearCrossEntropyLoss):
    """Fails in the forward of training, after ``skip`` such rows."""

    def __init__(self, most, skip=0):
        super().__init__()
        self.most, self.skip = most, skip

    def forward(self, output, hidden, *args, **kwargs):
        if hidden.shape[:-1].numel() > self.most and torch.is_grad_enabled():
            if self.skip == 0:
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
