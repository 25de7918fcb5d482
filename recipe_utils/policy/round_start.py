"""Log-probabilities that a policy gradient compares with: those of a reference, and of the policy that a round begins with.

Example: a round of 128 groups is four update steps of 32. In the first one the policy is the one that the round begins with, and
its ratio is exactly 1. In the other three its weights have changed: those of the start, which were copied, compute the
log-probabilities of each update step once, without gradients, in the same rows as the loss. A checkpoint contains the copy, in
shards that any number of ranks can load.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.losses.log_probs import LinearLogProbs
from recipe_utils.models.frozen import (
    Attached,
    frozen_copy,
    nothing_attached,
    start_of_adapters,
    trained_model,
)
from recipe_utils.models.runner import Rows, Runner
from recipe_utils.models.weights import with_weights
from recipe_utils.parallel.fsdp import local
from recipe_utils.policy.objective import check_effects, needs_reference, needs_start
from recipe_utils.policy.policy_losses import PolicyLoss
from recipe_utils.settings.keys import STRICT
from recipe_utils.torchtune_names import log_rank_zero
from recipe_utils.training.parts.protocol import Part
from recipe_utils.training.run import Run
from recipe_utils.training.setup import Built
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.step import Microbatch, UpdateStep

_KEY = "ref_checkpointer"


@dataclass(frozen=True, config=STRICT)
class PolicySettings:
    """Reference of a policy."""

    reference: Literal["live", "offload"] = "live"
    """``live`` or ``offload``: reference of a KL term or of ``advantage: teacher``, unless the file has its log-probabilities."""


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


def build_reference(
    settings: PolicySettings,
    built: Built,
    policy: Runner,
    loss_fn: PolicyLoss,
    rows: Rows,
    datasets: Iterable[Any],
) -> tuple[Attached, Mapping[str, str]]:
    """Returns the pass that attaches log-probabilities of a reference, and its fingerprints; see :func:`.needs_reference`.

    With adapters it is what training starts from; otherwise a copy of the model with the weights of
    ``built.ref_checkpointer``. Raises ConfigError if they do not fit, and see :func:`.check_effects`.
    """
    check_effects(built, loss_fn, datasets)
    if not needs_reference(loss_fn, *datasets):
        return nothing_attached, {}
    ranks, modules = built.run.ranks, built.settings.model
    offloads = settings.reference == "offload"
    if (same := start_of_adapters(policy, "reference", built.cfg.checkpointer)) is not None:
        if offloads:
            text = "reference=offload: not used, it shares its base with the trained model"
            log_rank_zero(text, logging.WARNING)
        model = replace(same, returning=loss_fn.returning_log_probs)
    else:
        log_probs = LinearLogProbs(loss_fn.tokens_per_chunk, loss_fn.num_output_chunks)
        model = frozen_copy(
            *("reference", built.meta_model, log_probs, built.ref_checkpointer, modules, ranks, rows),
            # FSDP2's own offload requires the weights on the CPU.
            is_offloaded=offloads and not modules.offloads_to_cpu(ranks.device),
            keys=(_KEY, _KEY),
        )
    return model.attached, model.fingerprints
