"""Log-probabilities of the policy that a round begins with, which a policy gradient compares with.

Example: a round of 128 groups is four update steps of 32. In the first one the policy is the one that the round begins with, and
its ratio is exactly 1. In the other three its weights have changed: those of the start, which were copied, compute the
log-probabilities of each update step once, without gradients, in the same rows as the loss. A checkpoint contains the copy, in
shards that any number of ranks can load.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.models.frozen import trained_model
from recipe_utils.models.runner import Runner
from recipe_utils.models.weights import with_weights
from recipe_utils.parallel.fsdp import local
from recipe_utils.policy.objective import needs_start
from recipe_utils.policy.policy_losses import PolicyLoss
from recipe_utils.training.parts.protocol import Part
from recipe_utils.training.run import Run
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.step import Microbatch, UpdateStep


class RoundStart(Part):
    """Policy at the start of a round, which attaches its log-probabilities as ``old``. All ranks together.

    A round is an epoch. Unless a ratio is to the start, nothing is copied and attached; see :func:`.needs_start`.
    """

    def __init__(self, run: Run, model: Runner, loss_fn: PolicyLoss, loader: UpdateStepLoader) -> None:
        self._run, self._model, self._epoch, self._is_at_start = run, model.module, -1, False
        self._weights: dict[str, Tensor] = {}
        if needs_start(loss_fn, loader):
            trained = {name: p for name, p in parameters_by_name(model.module).items() if p.requires_grad}
            self._weights = {name: p.detach().clone() for name, p in trained.items()}
        during = partial(with_weights, model.module, self._weights)
        frozen = trained_model(model, "old", during)
        self._frozen = replace(frozen, returning=loss_fn.returning_log_probs, attracts=False)

    @torch.no_grad()
    def before(self, step: UpdateStep) -> None:
        """Copies the weights before the first update step of a round."""
        self._is_at_start = self._epoch != self._run.state.epoch
        if self._is_at_start:
            self._epoch, parameters = self._run.state.epoch, parameters_by_name(self._model)
            for name, weight in self._weights.items():
                local(weight).copy_(local(parameters[name]))

    @contextmanager
    def attached(self, step: UpdateStep) -> Iterator[Sequence[Microbatch]]:
        """Yields the microbatches with ``old``; as they are if the policy has not changed, and in validation."""
        if self._is_at_start or not self._weights or not torch.is_grad_enabled():
            yield step.microbatches
            return
        with self._frozen.attached(step) as microbatches:
            yield microbatches

    def state(self) -> Mapping[str, Any]:
        """Returns the weights of the start."""
        return {"epoch": self._epoch, **self._weights} if self._weights else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes the epoch of the weights."""
        self._epoch = state.get("epoch", -1)
