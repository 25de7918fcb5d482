"""Log-probabilities of target tokens, of logits over a temperature, computed from hidden states in chunks.

Policies, pairs and their references compute them here, so that equal weights have equal ones, bit for bit.

Shapes: d embedding width, v vocabulary, n target tokens, c of a chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
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

    Logits are divided by the column ``temperatures``, if there is one. Those of all chunks but the last are recomputed in
    the backward, because the factor of each token's gradient is only known then: four matrix products, where a summed loss
    takes three. For the arguments see :class:`recipe_utils.losses.chunks.ChunkedLoss`.
    """

    splits_backward = False
    """True of losses whose backward may run twice, for hidden states and for weights."""

    def __init__(self, tokens_per_chunk: int = 2048, num_output_chunks: int = 8) -> None:
        super().__init__(tokens_per_chunk, num_output_chunks, IGNORE_INDEX, "loss")
        self.arithmetic: Arithmetic = (read, gradient)

    def compile_chunks(self, backend: Any) -> None:
        """Compiles the arithmetic on logits, also of the backward, once for chunks of any length."""
        self.arithmetic = compiled_for_all_lengths(read, backend), compiled_for_all_lengths(gradient, backend)

    def forward(self, output: OutputLayer, hidden: Tensor, targets: Targets, backward_in_parts: bool = False) -> Tensor:
        """Returns the targets' log-probabilities [n] in nats, at least fp32.

        Raises ValueError if ``backward_in_parts`` is True; see :mod:`recipe_utils.losses.attach`.
        """
        if backward_in_parts:
            raise ValueError("pipeline_parallel_schedule: this loss has no backward in parts")
        return self.of_labels(output, *self.at_targets(hidden, targets), temperatures_of(targets))

    def of_labels(self, output: OutputLayer, hidden: Tensor, labels: Tensor, temperatures: Tensor | None) -> Tensor:
        """Returns log-probabilities [n] of ``labels`` [n], for hidden states [n, d] and ``temperatures`` [n]."""
        weight = plain_weight(output)
        if weight is not None:
            weight = weight if torch.is_grad_enabled() else weight.detach()
            arguments = hidden, weight, labels, temperatures, self.tokens_per_chunk, self.arithmetic
            log_probs: Tensor = _ChunkedLinearLogProbs.apply(*arguments)
            return log_probs

        # An output layer without a plain weight, such as one with a bias, is called as a module.
        def of_chunk(*chunk: Tensor) -> Tensor:
            logits = output(chunk[0])
            logits = tempered(logits.to(sum_dtype(logits)), *chunk[2:])
            log_probs: Tensor = _LogProbsOfLogits.apply(logits, chunk[1], self.arithmetic)
            return log_probs

        given = (hidden, labels) if temperatures is None else (hidden, labels, temperatures)
        chunks = zip(*(each.tensor_split(self.num_output_chunks) for each in given), strict=True)
        return torch.cat([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])


Arithmetic = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]


def temperatures_of(targets: Targets) -> Tensor | None:
    """Returns the temperature of each target [n]; None if all are 1."""
    return None if "temperatures" in targets.defaults else targets.values.get("temperatures")


def tempered(logits: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Returns logits [c, v] over temperatures [c]."""
    return logits if temperatures is None else logits / temperatures.to(logits.dtype).unsqueeze(1)


def read(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the labels' logits [c] and the log-sum-exp of each row [c], for logits [c, v] and labels [c]."""
    return logits.gather(1, labels.unsqueeze(1)).squeeze(1), torch.logsumexp(logits, dim=-1)


def gradient(logits: Tensor, labels: Tensor, normalizers: Tensor, slopes: Tensor) -> Tensor:
    """Overwrites logits [c, v] with their gradient, given the slope of each log-probability [c]."""
    return gradient_of_logits(logits.sub_(normalizers.unsqueeze(1)).exp_(), labels, slopes)


def gradient_of_logits(probabilities: Tensor, labels: Tensor, slopes: Tensor) -> Tensor:
    """Overwrites probabilities [c, v] with the gradient of their logits, given the slope of each log-probability [c]."""
    slopes = slopes.unsqueeze(1)
    # d log_prob / d logits = one_hot(label) - softmax(logits)
    return probabilities.mul_(-slopes).scatter_add_(1, labels.unsqueeze(1), slopes)


class _ChunkedLinearLogProbs(torch.autograd.Function):
    """log_softmax(hidden @ weight.T / temperatures)[labels], with the logits of a chunk recomputed in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor | None,
        tokens_per_chunk: int,
        arithmetic: Arithmetic,
    ) -> Tensor:
        """Returns log-probabilities [n] for hidden [n, d], weight [v, d], labels [n]."""
        read_chunk, ctx.gradient = arithmetic
        picked = hidden.new_empty(len(hidden), dtype=sum_dtype(hidden))
        normalizers = torch.empty_like(picked)
        logits = None
        for chunk in chunks_of(len(hidden), tokens_per_chunk):
            del logits
            logits = _logits(hidden, weight, temperatures, chunk, picked.dtype)
            picked[chunk], normalizers[chunk] = read_chunk(logits, labels[chunk])
        ctx.save_for_backward(hidden, weight, labels, temperatures, normalizers)
        ctx.tokens_per_chunk = tokens_per_chunk
        # The last chunk's logits are kept for the backward: one chunk fits into memory. An attribute, not a
        # saved tensor: hooks that offload activations must leave it alone.
        ctx.logits = logits if any(ctx.needs_input_grad) else None
        return picked - normalizers

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Takes the gradient of each log-probability [n]."""
        hidden, weight, labels, temperatures, normalizers = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = WeightGradient(weight) if needs_weight else None
        logits, ctx.logits = ctx.logits, None
        for chunk in reversed(chunks_of(len(hidden), ctx.tokens_per_chunk)):
            if logits is None:
                logits = _logits(hidden, weight, temperatures, chunk, grad.dtype)
            slopes = grad[chunk] if temperatures is None else grad[chunk] / temperatures[chunk].to(grad.dtype)
            grad_logits = ctx.gradient(logits, labels[chunk], normalizers[chunk], slopes)
            grad_logits, logits = grad_logits.to(hidden.dtype), None
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight.add(grad_logits, hidden[chunk])
            del grad_logits
        return grad_hidden, None if grad_weight is None else grad_weight.total(), None, None, None, None


class _LogProbsOfLogits(torch.autograd.Function):
    """log_softmax(logits)[labels] of a chunk, of logits that a module has computed."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, arithmetic: Arithmetic) -> Tensor:
        read_chunk, ctx.gradient = arithmetic
        picked, normalizers = read_chunk(logits, labels)
        ctx.save_for_backward(logits, labels, normalizers)
        return picked - normalizers

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, normalizers = ctx.saved_tensors
        return ctx.gradient(logits.clone(), labels, normalizers, grad), None, None


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor | None, chunk: slice, dtype: torch.dtype) -> Tensor:
    """Returns the logits of a chunk over its temperatures [c, v]."""
    return tempered((hidden[chunk] @ weight.t()).to(dtype), None if temperatures is None else temperatures[chunk])
