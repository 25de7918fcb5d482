"""Output projection and cross-entropy in one, summed over target tokens.

Shapes: b samples, s slots per sample, d embedding width, v vocabulary, n target tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torchtune.modules.tied_linear import TiedLinear

from recipe_utils.data.microbatch import Targets


class LinearCrossEntropyLoss(nn.Module):
    """Output projection and cross-entropy in one, for target positions only and in chunks.

    Positions without a target are never projected, and no more than one chunk of logits exists at a
    time: each chunk's gradient is computed along with its loss (three matrix products, none twice).
    The idea of chunking over tokens is torchtune's (pull 1390), that of computing gradients in the
    forward Liger Kernel's (arXiv:2410.10989).

    Where the output weight cannot be read as one plain tensor (tensor parallel, an output layer that
    FSDP2 shards on its own, an output layer with a bias or of another kind), each chunk goes through
    the output layer itself and is recomputed in the backward.

    Args:
        tokens_per_chunk: target tokens projected at once; the logits take ``tokens_per_chunk * v``
            fp32 numbers.
        num_output_chunks: chunks where the output layer is called as a module. A fixed number,
            because all FSDP ranks must call it equally often.
        ignore_index: the label of positions that are no targets.
    """

    takes_hidden_states = True
    """See :class:`recipe_utils.loss.head.LinearLoss`."""

    def __init__(
        self, tokens_per_chunk: int = 2048, num_output_chunks: int = 8, ignore_index: int = -100
    ) -> None:
        super().__init__()
        if tokens_per_chunk < 1 or num_output_chunks < 1:
            raise ValueError(
                f"loss.tokens_per_chunk={tokens_per_chunk}, loss.num_output_chunks="
                f"{num_output_chunks}: both must be at least 1"
            )
        self.tokens_per_chunk = tokens_per_chunk
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index

    def forward(
        self,
        output: nn.Module | TiedLinear,
        hidden: Tensor,
        targets: Targets,
        backward_in_parts: bool = False,
    ) -> Tensor:
        """Returns the loss summed over the targets [nats], shape [], at least fp32.

        Args:
            output: the model's output layer, [..., d] -> [..., v].
            hidden: last hidden states after the final norm, [b, s, d].
            targets: of the microbatch. Without any the loss is 0, with a graph through ``hidden`` and
                the output weight.
            backward_in_parts: the backward runs twice, for ``hidden`` and for the weight, as zero-bubble
                schedules have it. It takes a second copy of both gradients then.
        """
        hidden = hidden.flatten(0, 1).index_select(0, targets.positions)
        labels = targets.labels.flatten().index_select(0, targets.positions)
        weight = plain_weight(output)
        if weight is not None:
            if not torch.is_grad_enabled():
                weight = weight.detach()  # or a validation would compute its gradient
            return _ChunkedLinearCrossEntropy.apply(
                hidden, weight, labels, self.tokens_per_chunk, backward_in_parts
            )
        loss = hidden.new_zeros((), dtype=sum_dtype(hidden))
        for hidden_chunk, labels_chunk in zip(
            hidden.tensor_split(self.num_output_chunks),
            labels.tensor_split(self.num_output_chunks),
            strict=True,
        ):
            loss = loss + checkpoint(
                _summed_cross_entropy, output, hidden_chunk, labels_chunk, use_reentrant=False
            )
        return loss


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """sum_i CE(hidden_i @ weight.T, labels_i), with the gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        tokens_per_chunk: int,
        backward_in_parts: bool,
    ) -> Tensor:
        """Takes hidden [n, d], weight [v, d], labels [n] -> loss []."""
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        loss = hidden.new_zeros((), dtype=sum_dtype(hidden))
        for start in range(0, len(hidden), tokens_per_chunk):
            chunk = slice(start, start + tokens_per_chunk)
            logits = (hidden[chunk] @ weight.t()).to(loss.dtype)
            log_probs = F.log_softmax(logits, dim=-1)
            del logits
            label = labels[chunk].unsqueeze(1)
            loss -= log_probs.gather(1, label).sum()
            if not (needs_hidden or needs_weight):
                continue
            # d loss / d logits = softmax(logits) - one_hot(label)
            grad_logits = log_probs.exp_()
            grad_logits.scatter_add_(1, label, grad_logits.new_full((), -1).expand_as(label))
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), hidden[chunk])
        # Attributes, not saved tensors: hooks that offload activations must leave these alone.
        ctx.grads = (grad_hidden, grad_weight)
        ctx.backward_in_parts = backward_in_parts
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """In place: the forward's gradients are handed on. A second backward has none, unless asked for."""
        grads = ctx.grads
        if ctx.backward_in_parts:
            grads = [None if grad is None else grad.clone() for grad in grads]
        else:
            ctx.grads = None
        for grad in grads:
            if grad is not None:
                grad.mul_(grad_loss)
        return *grads, None, None, None


def plain_weight(output: nn.Module | TiedLinear) -> Tensor | None:
    """The weight [v, d] of an output layer that is nothing but a matrix product with it; None of others."""
    if isinstance(output, TiedLinear):
        weight = output.tied_module.weight
    elif type(output) is nn.Linear and output.bias is None:
        weight = output.weight
    else:
        return None  # also an FSDPModule: its weight is sharded until its own forward
    return None if isinstance(weight, DTensor) else weight


def _summed_cross_entropy(
    output: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor
) -> Tensor:
    logits = output(hidden)
    return F.cross_entropy(logits.to(sum_dtype(logits)), labels, reduction="sum")


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """What a loss of ``tensor`` is summed in: at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)
