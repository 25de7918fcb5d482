"""What a model's forward ends in: a vector of sums over target tokens.

A loss here is a *sum*; the recipe multiplies it by the update step's scale before the backward. It is
computed inside the model's forward, because there FSDP2 holds the output weight unsharded.
"""

import os
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune import training

from recipe_utils.data.loader.microbatch import Targets
from recipe_utils.loss.stock import SummedLoss


class LinearLoss(Protocol):
    """A loss that projects hidden states itself, as ``LinearCrossEntropyLoss`` does."""

    takes_hidden_states: bool
    """True marks such a loss; others are called with logits."""

    def __call__(
        self, output: nn.Module, hidden: Tensor, targets: Targets, backward_in_parts: bool, /
    ) -> Tensor:
        """Sums over the targets [k], or [] for one; or what else a recipe makes them of.

        Args:
            output: the model's output layer, [..., d] -> [..., v].
            hidden: last hidden states after the final norm, [b, s, d].
            targets: of the microbatch, with a teacher's or reference's word if the recipe gives one.
            backward_in_parts: the backward runs twice, for ``hidden`` and for weights.
        """


class HiddenAtTargets:
    """A teacher's head: its last hidden states at the target positions, never its logits."""

    takes_hidden_states = True
    """See :class:`LinearLoss`."""

    def __call__(
        self,
        output: nn.Module,
        hidden: Tensor,
        targets: Targets,
        backward_in_parts: bool = False,
    ) -> Tensor:
        """Returns [n, d] of ``hidden`` [b, s, d]."""
        return hidden.flatten(0, 1).index_select(0, targets.positions)


def attach_head(model: nn.Module, loss_fn: Any, backward_in_parts: bool = False) -> None:
    """Makes ``model(..., targets=targets)`` return sums [k] instead of logits.

    The first is differentiated; others, if the loss has more, are what it is made of, to be logged.
    Called without ``targets`` the model returns logits as before.

    Args:
        model: a torchtune decoder, or a fusion model with one at ``decoder``. With a stock loss, any
            model that returns logits.
        loss_fn: a :class:`LinearLoss`, or a stock loss component, of which the sum is taken.
        backward_in_parts: zero-bubble schedules run the backward twice.

    Raises:
        ValueError: the loss does not fit the model, or see :class:`recipe_utils.loss.stock.SummedLoss`.
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

    if getattr(loss_fn, "takes_hidden_states", False):
        if not hasattr(decoder, "unembed"):
            raise ValueError(
                f"loss: {type(loss_fn).__name__} needs a torchtune TransformerDecoder, "
                f"{type(model).__name__} is none; use torchtune.modules.loss.CEWithChunkedOutputLoss"
            )
        logits_of = decoder.unembed

        def unembed(hidden: Tensor) -> Any:
            if not targets_in_forward:
                return logits_of(hidden)
            found: Any = loss_fn(
                decoder.output, decoder.norm(hidden), targets_in_forward.pop(), backward_in_parts
            )
            if isinstance(found, Tensor) and found.dim() == 0:
                return torch.stack([found])  # no view, of which FSDP2 warns
            return found

        decoder.unembed = unembed
        return

    summed_loss = SummedLoss(loss_fn)
    if hasattr(loss_fn, "num_output_chunks"):
        num_chunks: int = loss_fn.num_output_chunks
        model.set_num_output_chunks(num_chunks)  # type: ignore[operator]

        def chunked_output(hidden: Tensor) -> list[Tensor]:
            # torch.chunk makes fewer chunks of a short sequence. The ranks' sequences differ, and an
            # output layer that FSDP2 shards on its own must be called equally often on all of them.
            if targets_in_forward:
                hidden = F.pad(hidden, (0, 0, 0, -hidden.size(1) % num_chunks))
            return [decoder.output(chunk) for chunk in hidden.chunk(num_chunks, dim=1)]

        decoder.chunked_output = torch.compiler.disable(chunked_output)

    def logits_to_loss(_: nn.Module, __: tuple[Any, ...], logits: Any) -> Any:
        if not targets_in_forward:
            return logits
        return torch.stack([summed_loss(logits, targets_in_forward.pop())])

    model.register_forward_hook(logits_to_loss)


def compile_loss(loss_fn: Any, verbose: bool = False) -> None:
    """Compiles what a loss does with a chunk of logits, in place; not the loop over chunks.

    Compiled whole, a loss would be compiled again for each number of targets. A stock loss that is called with
    all logits at once is left as it is. The backend is torchtune's, ``TORCH_COMPILE_BACKEND`` in the environment.

    Args:
        loss_fn: of the model's head.
        verbose: says so.
    """
    if hasattr(loss_fn, "compile_chunks"):
        loss_fn.compile_chunks(os.environ.get("TORCH_COMPILE_BACKEND", "inductor"))
    elif hasattr(loss_fn, "num_output_chunks") and not hasattr(loss_fn, "takes_hidden_states"):
        training.compile_loss(loss_fn, verbose=verbose)
