"""Log-probabilities of target tokens, computed from hidden states in chunks.

Shapes: d embedding width, v vocabulary, n target tokens, c of a chunk.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recipe_utils.losses.chunks import (
    ChunkedLoss,
    OutputLayer,
    WeightGradient,
    chunks_of,
    compiled_for_all_lengths,
    plain_weight,
    sum_dtype,
)
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.step import Targets


class LinearLogProbs(ChunkedLoss):
    """Loss module for ``attach_loss`` that returns the log-probability of each target token.

    Logits of all chunks but the last are recomputed in the backward, because the factor of each
    token's gradient is only known then: four matrix products, where a summed loss takes three. For
    the arguments see :class:`recipe_utils.losses.chunks.ChunkedLoss`.
    """

    splits_backward = False
    """True of losses whose backward may run twice, for hidden states and for weights."""

    def __init__(self, tokens_per_chunk: int = 2048, num_output_chunks: int = 8) -> None:
        super().__init__(tokens_per_chunk, num_output_chunks, IGNORE_INDEX, "loss")
        self._arithmetic: _Arithmetic = (_read, _gradient)

    def compile_chunks(self, backend: Any) -> None:
        """Compiles the arithmetic on logits, also of the backward, once for chunks of any length."""
        self._arithmetic = compiled_for_all_lengths(_read, backend), compiled_for_all_lengths(_gradient, backend)

    def forward(self, output: OutputLayer, hidden: Tensor, targets: Targets, backward_in_parts: bool = False) -> Tensor:
        """Returns the targets' log-probabilities [n] in nats, at least fp32.

        Raises ValueError if ``backward_in_parts`` is True; see :mod:`recipe_utils.losses.attach`.
        """
        if backward_in_parts:
            raise ValueError("pipeline_parallel_schedule: this loss has no backward in parts")
        hidden, labels = self.at_targets(hidden, targets)
        weight = plain_weight(output)
        if weight is not None:
            log_probs: Tensor = _ChunkedLinearLogProbs.apply(
                hidden, weight, labels, self.tokens_per_chunk, self._arithmetic
            )
            return log_probs
        # An output layer without a plain weight, such as one with a bias, is called as a module.
        chunks = (tensor.tensor_split(self.num_output_chunks) for tensor in (hidden, labels))
        log_probs_of_chunk = partial(checkpoint, _log_probs, output, use_reentrant=False)
        return torch.cat(list(map(log_probs_of_chunk, *chunks)))


_Arithmetic = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]


def _read(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the labels' logits [c] and the log-sum-exp of each row [c], for logits [c, v] and labels [c]."""
    return logits.gather(1, labels.unsqueeze(1)).squeeze(1), torch.logsumexp(logits, dim=-1)


def _gradient(logits: Tensor, labels: Tensor, normalizers: Tensor, grad: Tensor) -> Tensor:
    """Overwrites logits [c, v] with their gradient, given that of each log-probability [c]."""
    grad = grad.unsqueeze(1)
    # d log_prob / d logits = one_hot(label) - softmax(logits)
    logits.sub_(normalizers.unsqueeze(1)).exp_().mul_(-grad)
    return logits.scatter_add_(1, labels.unsqueeze(1), grad)


class _ChunkedLinearLogProbs(torch.autograd.Function):
    """log_softmax(hidden @ weight.T)[labels], with the logits of a chunk recomputed in the backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, tokens_per_chunk: int, arithmetic: _Arithmetic
    ) -> Tensor:
        """Returns log-probabilities [n] for hidden [n, d], weight [v, d], labels [n]."""
        read, ctx.gradient = arithmetic
        picked = hidden.new_empty(len(hidden), dtype=sum_dtype(hidden))
        normalizers = torch.empty_like(picked)
        logits = None
        for chunk in chunks_of(len(hidden), tokens_per_chunk):
            del logits
            logits = (hidden[chunk] @ weight.t()).to(picked.dtype)
            picked[chunk], normalizers[chunk] = read(logits, labels[chunk])
        ctx.save_for_backward(hidden, weight, labels, normalizers)
        ctx.tokens_per_chunk = tokens_per_chunk
        # The last chunk's logits are kept for the backward: one chunk fits into memory. An attribute, not a
        # saved tensor: hooks that offload activations must leave it alone.
        ctx.logits = logits if any(ctx.needs_input_grad) else None
        return picked - normalizers

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Takes the gradient of each log-probability [n]."""
        hidden, weight, labels, normalizers = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = WeightGradient(weight) if needs_weight else None
        logits, ctx.logits = ctx.logits, None
        for chunk in reversed(chunks_of(len(hidden), ctx.tokens_per_chunk)):
            if logits is None:
                logits = (hidden[chunk] @ weight.t()).to(grad.dtype)
            grad_logits = ctx.gradient(logits, labels[chunk], normalizers[chunk], grad[chunk])
            grad_logits, logits = grad_logits.to(hidden.dtype), None
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight.add(grad_logits, hidden[chunk])
            del grad_logits
        return grad_hidden, None if grad_weight is None else grad_weight.total(), None, None, None


def _log_probs(output: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = output(hidden)
    log_probs = F.log_softmax(logits.to(sum_dtype(logits)), dim=-1)
    return log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)
