"""Exponential moving average of the weights, as a user writes it: validated, sampled and exported instead of them.

In ``setup`` of a recipe, before ``run.resume``::

    average = MovingAverage(self.model, decay=0.9)
    run.parts.add("average", average)
    run.parts.weights = average.weights
"""

import torch

from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.models.weights import with_weights
from recipe_utils.parallel.fsdp import local
from recipe_utils.training.parts.protocol import Part


class MovingAverage(Part):
    """Computes average = decay * average + (1 - decay) * weights after each update step, on each rank's shards."""

    def __init__(self, model, decay):
        self.model, self.decay, self.num_steps = model, decay, 0
        self.average = {name: weight.detach().clone() for name, weight in parameters_by_name(model).items()}

    @torch.no_grad()
    def after(self, step):
        self.num_steps += 1
        for name, weight in parameters_by_name(self.model).items():
            local(self.average[name]).lerp_(local(weight), 1 - self.decay)
        return {"num_averaged": self.num_steps}

    def state(self):
        return {"num_steps": self.num_steps, **self.average}

    def load(self, state):
        self.num_steps = state["num_steps"]

    def weights(self):
        return with_weights(self.model, self.average)
