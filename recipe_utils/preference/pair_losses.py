"""Preference losses with the signature of torchtune's ``DPOLoss`` and ``RSOLoss``.

Each takes log-probabilities [p] of the policy's chosen and rejected answers and of the reference's,
and returns the loss of each pair [p] and the detached rewards of both answers [p]. Two attributes
define the inputs: ``normalizes_length = True`` (means over an answer's targets instead of sums) and
``needs_reference = False`` (zeros as reference log-probabilities).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torchtune.rlhf.loss import DPOLoss

from recipe_utils.losses.chunks import OutputLayer, Record
from recipe_utils.losses.log_probs import LinearLogProbs
from recipe_utils.settings.keys import STRICT, Count
from recipe_utils.settings.problems import build
from recipe_utils.torchtune_names import instantiate
from recipe_utils.training.log import Reported
from recipe_utils.update_steps.step import Targets

Losses = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, config=STRICT)
class PreferenceSettings:
    """Settings of a preference loss besides the loss itself."""

    sft_loss_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the mean negative log-likelihood per target of the chosen answers, added to the loss."""
    tokens_per_chunk: Count = 2048
    """Maximum number of target tokens whose logits exist at a time."""


class IPOLoss(nn.Module):
    """Identity preference optimization (Azar et al. 2023, arXiv:2310.12036, equation 17).

    Args:
        tau: strength of the reference, the paper's regularization; TRL's ``beta``.
        normalizes_length: True uses mean log-probabilities per target, as TRL does; False uses
            sums, as the equation does.
    """

    def __init__(self, tau: float = 0.1, normalizes_length: bool = True) -> None:
        super().__init__()
        if tau <= 0:
            raise ValueError(f"loss.tau={tau}: it must be above 0")
        self.tau = tau
        self.normalizes_length = normalizes_length

    def forward(self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Losses:
        """Returns losses and rewards; see the module."""
        chosen, rejected = chosen - ref_chosen, rejected - ref_rejected
        losses = (chosen - rejected - 1 / (2 * self.tau)).square()
        return losses, self.tau * chosen.detach(), self.tau * rejected.detach()


class RobustDPOLoss(DPOLoss):
    """DPO for labels of which a known fraction is wrong (Chowdhury et al. 2024, arXiv:2403.00409, equation 12).

    Unbiased: its expectation over wrong labels is the loss of the correct ones. The conservative
    variant, ``DPOLoss`` with ``label_smoothing``, is biased.

    Args:
        beta: strength of the reference.
        label_smoothing: fraction n of pairs whose answers are swapped, below 0.5.
    """

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.1) -> None:
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(
                f"loss.label_smoothing={label_smoothing}: it must be at least 0 and below 0.5, where labels are random"
            )
        # ((1 - n) * loss - n * loss of swapped answers) / (1 - 2 n) is DPOLoss with this label_smoothing.
        super().__init__(beta, -label_smoothing / (1 - 2 * label_smoothing))


class NormalizedDPOLoss(DPOLoss):
    """DPO on mean log-probabilities per target token (Tulu 3, Lambert et al. 2024, arXiv:2411.15124, equation 6).

    Means need a larger ``beta`` than sums.
    """

    normalizes_length = True

    def __init__(self, beta: float = 5.0, label_smoothing: float = 0.0) -> None:
        super().__init__(beta, label_smoothing)


class SimPOLoss(nn.Module):
    """Simple preference optimization, without a reference (Meng et al. 2024, arXiv:2405.14734, equation 6).

    Args:
        beta: scale of the rewards, which are mean log-probabilities per target.
        gamma: target margin between the rewards.
    """

    normalizes_length = True
    needs_reference = False

    def __init__(self, beta: float = 2.0, gamma: float = 1.0) -> None:
        super().__init__()
        self.beta = beta
        self.gamma = gamma

    def forward(self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Losses:
        """Returns losses and rewards, without the reference."""
        chosen, rejected = self.beta * chosen, self.beta * rejected
        return -F.logsigmoid(chosen - rejected - self.gamma), chosen.detach(), rejected.detach()


class ORPOLoss(nn.Module):
    """Odds ratio preference optimization, without a reference (Hong et al. 2024, arXiv:2403.07691, equations 6 and 7).

    ``-beta log sigmoid(log odds(chosen) - log odds(rejected))`` with ``odds = p / (1 - p)``, where ``log p`` is the mean
    log-probability per target. The paper's other term, the likelihood of chosen answers, is ``sft_loss_weight: 1.0``.

    Args:
        beta: weight of the odds ratio, the paper's lambda.
    """

    normalizes_length = True
    needs_reference = False

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Losses:
        """Returns losses and rewards, without the reference."""
        # The odds of an answer that is certain would be infinite, and their gradient NaN.
        odds = [each - torch.log(-torch.expm1(each.clamp(max=-1e-9))) for each in (chosen, rejected)]
        losses = -self.beta * F.logsigmoid(odds[0] - odds[1])
        return losses, self.beta * chosen.detach(), self.beta * rejected.detach()


METRICS = (
    "preference_loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
    "log_probs/chosen", "log_probs/rejected", "sft_loss",
)  # fmt: skip
"""Names of sums over pairs; the last is a sum over the targets of chosen answers."""

PAIRS = Reported(metrics=("loss", "rewards/accuracies", "rewards/margins"))
"""Main metrics."""


class PreferenceLoss(nn.Module):
    """Loss module for ``attach_loss`` that computes a preference loss from the answers' log-probabilities.

    Without reference log-probabilities attached to a microbatch it returns the model's own, so that
    a reference model can use it. Make ``loss_fn`` with :func:`make_preference_loss`.
    """

    takes_hidden_states = True
    sums = METRICS
    returns_sums = True
    splits_backward = LinearLogProbs.splits_backward
    records: Sequence[Record] = ()
    """See :mod:`recipe_utils.training.parts.sample_losses`."""

    def __init__(self, loss_fn: Any, tokens_per_chunk: int = 2048) -> None:
        super().__init__()
        self.log_probs = LinearLogProbs(tokens_per_chunk)
        self.compile_chunks = self.log_probs.compile_chunks
        self.loss_fn = loss_fn

    @property
    def needs_reference(self) -> bool:
        """Returns False for a loss of the policy alone."""
        return bool(getattr(self.loss_fn, "needs_reference", True))

    def returning_log_probs(self) -> AbstractContextManager[None]:
        """Returns log-probabilities wherever those of a reference are not attached."""
        return nullcontext()

    def forward(self, output: OutputLayer, hidden: Tensor, targets: Targets, backward_in_parts: bool = False) -> Tensor:
        """Returns sums of ``METRICS``, [8] in fp64, or log-probabilities [2 p] of answers [nats].

        ``targets`` may have reference log-probabilities [2 p] attached. For the arguments see
        :mod:`recipe_utils.losses.attach`.
        """
        of_targets = self.log_probs(output, hidden, targets, backward_in_parts)
        policy, num_targets = map(_of_answers, sums_of_sequences(of_targets, targets))
        reference = targets.outputs.get("reference")
        if not self.needs_reference:
            reference = torch.zeros_like(policy)
        if reference is None:
            return policy
        log_probs = torch.stack([policy, reference])
        if getattr(self.loss_fn, "normalizes_length", False):
            # Per pair: the recipe still divides the loss by the number of pairs.
            log_probs = log_probs / num_targets
        # Of the two answers of each pair, chosen before rejected
        losses, chosen, rejected = self.loss_fn(*log_probs.view(2, -1, 2).transpose(1, 2).flatten(0, 1))
        for record in self.records:
            assert targets.items is not None
            assert targets.samples is not None
            record(losses, targets.items[::2], targets.samples[::2])
        margins = chosen - rejected
        wins = (margins > 0).double()
        return torch.stack([losses, chosen, rejected, margins, wins, *policy.view(-1, 2).T, -policy[::2]]).sum(1)


def sums_of_sequences(of_targets: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Returns sums [2 p, 2] in fp64 of ``of_targets`` [n] over the targets of each answer, and their numbers [2 p, 2].

    Of each answer, over the targets that both have in common and over the rest, in the order of its tokens.
    In fp64, because a loss takes differences of large sums; in a fixed order, so that equal models give equal sums.
    """
    owners, common = targets.sequences, targets.of_samples["common_tokens"]
    numbers = torch.zeros_like(common).index_add_(0, owners, torch.ones_like(owners))
    numbers = torch.stack([common, numbers - common], dim=1)
    in_order = of_targets.double().index_select(0, owners.argsort(stable=True))
    # unsafe: the check would synchronize with the device, and fails without sequences.
    sums = torch.segment_reduce(in_order, "sum", lengths=numbers.flatten(), unsafe=True, initial=0)
    return sums.view(-1, 2), numbers


def _of_answers(of_sequences: Tensor) -> Tensor:
    """Returns [2 p] of both answers of p pairs: what they have in common [2 p, 0] is a part of the chosen one's sequence."""
    return (of_sequences.sum(1).view(-1, 2) + of_sequences[:, 0].view(-1, 2).flip(1)).flatten()


def build_loss(cfg: DictConfig, tokens_per_chunk: int) -> "PreferenceLoss":
    """Builds ``loss``, which takes log-probabilities of answers, as the loss module of a model. Raises ConfigError."""
    loss_fn = build("loss", make_preference_loss, partial(instantiate, cfg.loss))
    return PreferenceLoss(loss_fn, tokens_per_chunk)


def make_preference_loss(make: Callable[[], Any]) -> Any:
    """Makes a preference loss and tests it on a few pairs, together and one by one.

    The recipe sums losses over the pairs of an update step, however they are split over microbatches. Raises ValueError
    unless the loss takes log-probabilities of pairs, returns a loss and two rewards for each that depend on no other
    pair, and prefers chosen answers.
    """
    loss_fn = make()
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    generator = torch.Generator().manual_seed(0)
    pairs = -20 * torch.rand(4, 5, generator=generator, dtype=torch.float64)
    try:
        outputs = loss_fn(*pairs)
        shapes = [tuple(output.shape) for output in outputs]
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(
            f"loss: {name} does not take log-probabilities of pairs ({reason}); set it to "
            "torchtune.rlhf.loss.DPOLoss, or a loss of recipe_utils.preference"
        ) from error
    if shapes != [(5,)] * 3:
        raise ValueError(
            f"loss: {name} returns shapes {shapes} for 5 pairs instead of {[(5,)] * 3}, a loss and two rewards "
            "for each; a mean over the pairs must be left to the recipe"
        )
    # A loss that compares pairs of a batch, such as by their order, would depend on the layout.
    alone = [loss_fn(*pairs[:, i : i + 1]) for i in range(5)]
    for together, one_by_one in zip(outputs, zip(*alone, strict=True), strict=True):
        if not torch.allclose(together, torch.cat(one_by_one), rtol=1e-9, atol=1e-12, equal_nan=True):
            raise ValueError(
                f"loss: the loss or rewards that {name} returns of a pair depend on the other pairs of its "
                "batch, and so on batch_size and the number of ranks; set it to a loss of each pair by itself"
            )
    _check_direction(loss_fn, name)
    return loss_fn


def _check_direction(loss_fn: Any, name: str) -> None:
    """Raises ValueError unless a loss prefers chosen answers where policy and reference agree."""
    smoothing = getattr(loss_fn, "label_smoothing", 0)
    if smoothing < 0 and not isinstance(loss_fn, RobustDPOLoss):
        raise ValueError(f"loss.label_smoothing={smoothing}: it must be at least 0 and below 0.5")
    reference = -10 * torch.ones(2, 1, dtype=torch.float64)
    policy = reference.clone().requires_grad_()
    loss = loss_fn(*policy, *reference)[0].sum()
    if loss.requires_grad:
        loss.backward()
    slope = 0.0 if policy.grad is None else (policy.grad[0] - policy.grad[1]).item()
    if not slope < -1e-9:
        teaches = "nothing" if abs(slope) <= 1e-9 else "the rejected answers"
        raise ValueError(
            f"loss: {name} teaches {teaches} where policy and reference agree (its slope along the margin is "
            f"{slope:g}); look at the sign and size of its arguments, such as beta and label_smoothing"
        )
