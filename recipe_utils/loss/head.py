"""Summed cross-entropy over target tokens.

Shapes: b samples, s slots per sample, d embedding width, v vocabulary, n target tokens.

A loss here is a *sum*; the recipe multiplies it by the update step's ``loss_scale`` before the
backward. It is computed inside the model's forward, because there FSDP2 holds the output weight
unsharded.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torchtune.modules.tied_linear import TiedLinear

from recipe_utils.data.collate import Targets


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
        weight = _plain_weight(output)
        if weight is not None:
            if not torch.is_grad_enabled():
                weight = weight.detach()  # or a validation would compute its gradient
            return _ChunkedLinearCrossEntropy.apply(
                hidden, weight, labels, self.tokens_per_chunk, backward_in_parts
            )
        loss = hidden.new_zeros((), dtype=_sum_dtype(hidden))
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
        loss = hidden.new_zeros((), dtype=_sum_dtype(hidden))
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


class SummedLoss:
    """Turns a stock loss component, a mean over the labels it does not ignore, into their sum.

    Args:
        loss_fn: called with (logits, labels) in the shapes that the stock recipes use: flattened
            [b * s, v] and [b * s], or, where the model returns a list of chunks
            (``CEWithChunkedOutputLoss``), that list and [b, s].

    Raises:
        ValueError: a loss whose mean is no plain average over target tokens.
    """

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        reduction = getattr(loss_fn, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"loss.reduction={reduction}: set it to 'mean' or 'sum'")
        if getattr(loss_fn, "weight", None) is not None:
            raise ValueError(
                "loss.weight: class weights make the loss something else than an average over "
                "target tokens; leave it out"
            )
        self._is_sum = reduction == "sum"
        self._loss_fn = loss_fn
        self.ignore_index: int = loss_fn.ignore_index  # type: ignore[attr-defined]

    def __call__(self, logits: Tensor | list[Tensor], targets: Targets) -> Tensor:
        """Returns the loss summed over the targets [nats], shape []."""
        num_targets = len(targets.positions)
        labels = targets.labels
        if num_targets == 0:
            # A mean over nothing is NaN. One label, weighted 0, gives 0 with a graph instead.
            labels = labels.clone()
            labels[0, 0] = 0
        if isinstance(logits, list):
            num_padding = sum(chunk.size(1) for chunk in logits) - labels.size(1)
            labels = F.pad(labels, (0, num_padding), value=self.ignore_index)
        else:
            logits, labels = logits.reshape(-1, logits.size(-1)), labels.reshape(-1)
        loss = self._loss_fn(logits, labels)
        if self._is_sum:
            return loss if num_targets else loss * 0
        return loss * num_targets


def compute_loss_in_forward(
    model: nn.Module, loss_fn: nn.Module, backward_in_parts: bool = False
) -> None:
    """Makes ``model(..., targets=targets)`` return the summed loss instead of logits.

    Called without ``targets`` the model returns logits as before. The loss runs inside the model's
    forward, where FSDP2 holds the output weight unsharded, so that it need not be gathered again.

    Args:
        model: a torchtune decoder, or a fusion model with one at ``decoder``. With a stock loss, any
            model that returns logits.
        loss_fn: :class:`LinearCrossEntropyLoss` or a stock loss component.
        backward_in_parts: see :meth:`LinearCrossEntropyLoss.forward`.

    Raises:
        ValueError: the loss does not fit the model, or see :class:`SummedLoss`.
    """
    decoder: Any = getattr(model, "decoder", model)
    targets_in_forward: list[Targets] = []

    def take_targets(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        targets_in_forward.clear()
        if "targets" in kwargs:
            targets_in_forward.append(kwargs.pop("targets"))
        return args, kwargs

    model.register_forward_pre_hook(take_targets, with_kwargs=True)

    if isinstance(loss_fn, LinearCrossEntropyLoss):
        if not hasattr(decoder, "unembed"):
            raise ValueError(
                f"loss: LinearCrossEntropyLoss needs a torchtune TransformerDecoder, "
                f"{type(model).__name__} is none; use torchtune.modules.loss.CEWithChunkedOutputLoss"
            )
        logits_of = decoder.unembed

        def unembed(hidden: Tensor) -> Tensor:
            if not targets_in_forward:
                return logits_of(hidden)
            return loss_fn(
                decoder.output, decoder.norm(hidden), targets_in_forward.pop(), backward_in_parts
            )

        decoder.unembed = unembed
        return

    summed_loss = SummedLoss(loss_fn)
    if hasattr(loss_fn, "num_output_chunks"):
        num_chunks: int = loss_fn.num_output_chunks  # type: ignore[assignment]
        model.set_num_output_chunks(num_chunks)  # type: ignore[operator]

        def chunked_output(hidden: Tensor) -> list[Tensor]:
            # torch.chunk makes fewer chunks of a short sequence. The ranks' sequences differ, and an
            # output layer that FSDP2 shards on its own must be called equally often on all of them.
            if targets_in_forward:
                hidden = F.pad(hidden, (0, 0, 0, -hidden.size(1) % num_chunks))
            return [decoder.output(chunk) for chunk in hidden.chunk(num_chunks, dim=1)]

        decoder.chunked_output = torch.compiler.disable(chunked_output)

    def logits_to_loss(_: nn.Module, __: tuple[Any, ...], logits: Any) -> Any:
        return summed_loss(logits, targets_in_forward.pop()) if targets_in_forward else logits

    model.register_forward_hook(logits_to_loss)


def _plain_weight(output: nn.Module | TiedLinear) -> Tensor | None:
    """The weight [v, d] of an output layer that is nothing but a matrix product with it."""
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
    return F.cross_entropy(logits.to(_sum_dtype(logits)), labels, reduction="sum")


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
