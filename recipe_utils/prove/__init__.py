"""Comparison of an update step's gradient with single samples: ``python -m recipe_utils.prove``.

Here are the components that replace those of the user's config.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from recipe_utils.parallel.fsdp import local


class GradientRecorder(Optimizer):
    """Optimizer that replaces each weight by its gradient, with the arguments of any other."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.0, **options})
        self.has_stepped = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Replaces the weights; :func:`gather_weights` then gathers gradients."""
        self.has_stepped = True
        for group in self.param_groups:
            for p in group["params"]:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                if isinstance(p, DTensor):  # tensor parallelism does not shard that of embeddings
                    grad = grad.redistribute(placements=p.placements)
                local(p).copy_(local(grad))
