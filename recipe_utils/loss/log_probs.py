"""Log-probabilities of target tokens, and of whole answers, without a tensor of all logits.

Shapes: b samples, s slots per sample, d embedding width, v vocabulary, n target tokens, p pairs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchtune.modules.tied_linear import TiedLinear

from recipe_utils.data.loader.microbatch import Pairs, Targets
from recipe_utils.loss.chunks import chunks_of, compiled_for_all_lengths, plain_weight, sum_dtype


class LinearLogProbs(nn.Module):
    """The log-probability of each target token, for ``attach_loss``: projected a chunk of targets at a time.

    Chunks of logits but the last are recomputed in the backward, since what each token's gradient is
    multiplied with is known only then: four matrix products, where a summed loss takes three. Where the
    output weight cannot be read as one plain tensor, each chunk goes through the output layer itself;
    see :func:`recipe_utils.loss.chunks.sum_over_chunks`.

    Args:
        tokens_per_chunk: target tokens projected at once; the logits take ``tokens_per_chunk * v``
            fp32 numbers.
        num_output_chunks: chunks where the output layer is called as a module. A fixed number,
            because all FSDP ranks must call it equally often.
    """

    takes_hidden_states = True

    def __init__(self, tokens_per_chunk: int = 2048, num_output_chunks: int = 8) -> None:
        super().__init__()
        self.tokens_per_chunk = tokens_per_chunk
        self.num_output_chunks = num_output_chunks
        self._arithmetic: _Arithmetic = (_read, _gradient)

    def compile_chunks(self, backend: Any) -> None:
        """Compiles the arithmetic on logits, that of the backward, too: once each for chunks of any length.

        Args:
            backend: of ``torch.compile``.
        """
        read, gradient = (compiled_for_all_lengths(each, backend) for each in (_read, _gradient))
        self._arithmetic = (read, gradient)

    def forward(
        self,
        output: nn.Module | TiedLinear,
        hidden: Tensor,
        targets: Targets,
        backward_in_parts: bool = False,
    ) -> Tensor:
        """Returns the targets' log-probabilities [n] in nats, at least fp32.

        Args:
            output: the model's output layer, [..., d] -> [..., v].
            hidden: last hidden states after the final norm, [b, s, d].
            targets: of the microbatch. Without any the result is empty, with a graph through ``hidden``
                and the output weight.
            backward_in_parts: not supported.

        Raises:
            ValueError: ``backward_in_parts``.
        """
        if backward_in_parts:
            raise ValueError(
                "pipeline_parallel_schedule: log-probabilities have no backward in parts"
            )
        hidden = hidden.flatten(0, 1).index_select(0, targets.positions)
        labels = targets.labels.flatten().index_select(0, targets.positions)
        weight = plain_weight(output)
        if weight is not None:
            log_probs: Tensor = _ChunkedLinearLogProbs.apply(
                hidden, weight, labels, self.tokens_per_chunk, self._arithmetic
            )
            return log_probs
        chunks = zip(
            hidden.tensor_split(self.num_output_chunks),
            labels.tensor_split(self.num_output_chunks),
            strict=True,
        )
        return torch.cat(
            [checkpoint(_log_probs, output, *chunk, use_reentrant=False) for chunk in chunks]
        )


_Arithmetic = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]


def _read(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits [c, v] those of the labels [c], and the logarithms of the softmax's sums [c]."""
    return logits.gather(1, labels.unsqueeze(1)).squeeze(1), torch.logsumexp(logits, dim=-1)


def _gradient(logits: Tensor, labels: Tensor, normalisers: Tensor, of_token: Tensor) -> Tensor:
    """For the logits [c, v], in their place, from that of each log-probability [c]."""
    of_token = of_token.unsqueeze(1)
    # d log_prob / d logits = one_hot(label) - softmax(logits)
    logits.sub_(normalisers.unsqueeze(1)).exp_().mul_(-of_token)
    return logits.scatter_add_(1, labels.unsqueeze(1), of_token)


class _ChunkedLinearLogProbs(torch.autograd.Function):
    """log_softmax(hidden @ weight.T)[labels], with the logits of a chunk recomputed in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        tokens_per_chunk: int,
        arithmetic: _Arithmetic,
    ) -> Tensor:
        """Takes hidden [n, d], weight [v, d], labels [n] -> log-probabilities [n]."""
        read, ctx.gradient = arithmetic
        picked = hidden.new_empty(len(hidden), dtype=sum_dtype(hidden))
        normalisers = torch.empty_like(picked)
        logits = None
        for chunk in chunks_of(len(hidden), tokens_per_chunk):
            del logits
            logits = (hidden[chunk] @ weight.t()).to(picked.dtype)
            picked[chunk], normalisers[chunk] = read(logits, labels[chunk])
        ctx.save_for_backward(hidden, weight, labels, normalisers)
        ctx.tokens_per_chunk = tokens_per_chunk
        # There is room for a chunk, so the last one's logits wait for the backward. An attribute, no saved
        # tensor: hooks that offload activations must leave it alone.
        ctx.logits = logits if any(ctx.needs_input_grad) else None
        return picked - normalisers

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Takes the gradient of each log-probability [n]."""
        hidden, weight, labels, normalisers = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        logits, ctx.logits = ctx.logits, None
        for chunk in reversed(chunks_of(len(hidden), ctx.tokens_per_chunk)):
            if logits is None:
                logits = (hidden[chunk] @ weight.t()).to(grad.dtype)
            grad_logits = ctx.gradient(logits, labels[chunk], normalisers[chunk], grad[chunk])
            grad_logits, logits = grad_logits.to(hidden.dtype), None
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), hidden[chunk])
            del grad_logits
        return grad_hidden, grad_weight, None, None, None


def _log_probs(output: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = output(hidden)
    log_probs = F.log_softmax(logits.to(sum_dtype(logits)), dim=-1)
    return log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)


def sums_of_answers(of_tokens: Tensor, pairs: Pairs) -> Tensor:
    """Sums over the targets of each chosen and each rejected answer, [2, p] in fp64.

    Targets of what both share count for both. In fp64 because a loss sees differences of large sums; in a
    fixed order, so that equal models give equal sums.

    Args:
        of_tokens: log-probability of each target, [n].
        pairs: of the microbatch.
    """
    lengths = pairs.segment_lengths
    # unsafe: its check would wait for the device, and has no answer for no pair.
    sums = torch.segment_reduce(of_tokens.double(), "sum", lengths=lengths, unsafe=True, initial=0)
    shared, chosen, rejected = sums.view(-1, 3).unbind(1)
    return torch.stack([shared + chosen, shared + rejected])


def num_targets_of_answers(pairs: Pairs) -> Tensor:
    """Targets of each chosen and each rejected answer, [2, p]."""
    shared, chosen, rejected = pairs.segment_lengths.view(-1, 3).unbind(1)
    return torch.stack([shared + chosen, shared + rejected])
