"""Attaches loss modules to a model. Each returns sums over target tokens, which the recipe scales.

A loss module runs inside the model's forward, because FSDP2 holds the output weight unsharded
there. One with ``takes_hidden_states = True`` projects hidden states itself. It is called with the
model's output layer [..., d] -> [..., v], the last hidden states after the final norm [b, s, d],
the microbatch's :class:`Targets` and ``backward_in_parts`` (the backward runs twice, for hidden
states and for weights), and returns sums [k] or []. All other losses are called with logits.
"""

import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torchtune import training

from recipe_utils.compiler import configure_compiler
from recipe_utils.model_kinds import text_decoder
from recipe_utils.settings.problems import ConfigError, Problem, naming
from recipe_utils.torchtune_names import instantiate
from recipe_utils.update_steps.step import Targets


class HiddenAtTargets:
    """Returns a teacher's last hidden states at ``targets.positions``, or another field, never its logits."""

    takes_hidden_states = True

    def __init__(self, field: str = "positions") -> None:
        self._field = field

    def __call__(self, _: nn.Module, hidden: Tensor, targets: Any, *__: bool) -> Tensor:
        """Returns [n, d] of ``hidden`` [b, s, d]."""
        return hidden.flatten(0, 1).index_select(0, getattr(targets, self._field))


def build_loss(cfg: DictConfig) -> Any:
    """Builds a loss of fine-tuning. Raises ValueError if it has no ``ignore_index``."""
    loss_fn = instantiate(cfg)
    if not hasattr(loss_fn, "ignore_index"):
        raise ValueError(
            f"loss: {type(loss_fn).__name__} has no ignore_index, which marks positions without a target; set it "
            "to recipe_utils.losses.LinearCrossEntropyLoss"
        )
    return loss_fn


def attach_loss(
    model: nn.Module,
    loss_fn: Any,
    backward_in_parts: bool = False,
    compiles: bool = False,
) -> None:
    """Makes ``model(..., targets=targets)`` return sums [k], of which only the first is differentiated.

    Without ``targets`` the model still returns logits. With ``compiles`` the loss is compiled, see
    :func:`compile_loss`.

    ``model`` is a torchtune decoder, or a fusion model with one at ``decoder``; with a stock loss
    (:class:`SummedLoss`), any model that returns logits. Raises ValueError if the loss does not fit
    the model.
    """
    if compiles:
        compile_loss(loss_fn)
    # Targets are an argument of the model's forward, because FSDP2 has the output weight gathered only there.
    targets_in_forward: list[Targets] = []

    def take_targets(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        targets_in_forward.clear()
        if "targets" in kwargs:
            targets_in_forward.append(kwargs.pop("targets"))
        return args, kwargs

    model.register_forward_pre_hook(take_targets, with_kwargs=True)
    if not getattr(loss_fn, "takes_hidden_states", False):
        _attach_to_logits(model, SummedLoss(loss_fn), loss_fn, targets_in_forward)
        return
    decoder = text_decoder(model)
    if not hasattr(decoder, "unembed"):
        raise ValueError(
            f"loss: {type(loss_fn).__name__} needs a torchtune TransformerDecoder, "
            f"{type(model).__name__} is none; use torchtune.modules.loss.CEWithChunkedOutputLoss"
        )
    logits_of = decoder.unembed

    # The loss stands in the place of the output projection, so that logits never exist as a whole.
    def unembed(hidden: Tensor) -> Any:
        if not targets_in_forward:
            return logits_of(hidden)
        sums: Any = loss_fn(decoder.output, decoder.norm(hidden), targets_in_forward.pop(), backward_in_parts)
        if isinstance(sums, Tensor) and sums.dim() == 0:
            sums = torch.stack([sums])  # not a view, for which FSDP2 warns
        return sums

    decoder.unembed = unembed


def _attach_to_logits(
    model: nn.Module, summed_loss: "SummedLoss", loss_fn: Any, targets_in_forward: list[Targets]
) -> None:
    """Makes a model's forward end in a stock loss of its logits, if it was called with targets."""
    decoder = text_decoder(model)
    if hasattr(decoder, "output"):
        summed_loss.check(getattr(decoder.output, "tied_module", decoder.output).weight.size(0))
    # A chunked loss takes a list of logits, which only a torchtune decoder makes.
    if hasattr(loss_fn, "num_output_chunks"):
        if not hasattr(model, "set_num_output_chunks"):
            raise ValueError(
                f"loss: {type(loss_fn).__name__} needs a torchtune TransformerDecoder, {type(model).__name__} is "
                "none; use recipe_utils.losses.LinearCrossEntropyLoss"
            )
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


def check_sums(sums: Any, num_sums: int) -> None:
    """Raises ConfigError if a loss module has returned anything but ``num_sums`` sums, [k] or, for k = 1, []."""
    shape = list(sums.shape) if isinstance(sums, Tensor) else type(sums).__name__
    if shape not in ([num_sums], *[[]] * (num_sums == 1)):
        text = f"it returns {shape} and not [{num_sums}], the sum over targets first; "
        text += "name what it returns in an attribute `sums` of its class, or return fewer"
        raise ConfigError(Problem("loss._component_", text))


class SummedLoss:
    """Turns a stock loss component, a mean over the labels it does not ignore, into their sum.

    ``loss_fn`` is called as in the stock recipes: with logits [b * s, v] and labels [b * s], or, if
    the model returns a list of chunks (``CEWithChunkedOutputLoss``), with that list and [b, s].

    Raises ValueError if the loss's mean is not an unweighted average over target tokens.
    """

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        if isinstance(loss_fn, nn.NLLLoss):
            raise ValueError(
                "loss: NLLLoss takes log-probabilities, and a model returns logits; set it to torch.nn.CrossEntropyLoss"
            )
        reduction = getattr(loss_fn, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"loss.reduction={reduction}: set it to 'mean' or 'sum'")
        if getattr(loss_fn, "weight", None) is not None:
            raise ValueError(
                "loss.weight: with class weights the loss is not an average over target tokens; leave it out"
            )
        smoothing = getattr(loss_fn, "label_smoothing", 0)
        if not 0 <= smoothing <= 1:
            raise ValueError(f"loss.label_smoothing={smoothing}: it must be from 0 to 1")
        self._is_sum = reduction == "sum"
        self._loss_fn = loss_fn
        self.ignore_index: int = loss_fn.ignore_index  # type: ignore[attr-defined]

    def __call__(self, logits: Tensor | list[Tensor], targets: Targets) -> Tensor:
        """Returns the loss summed over the targets [nats], shape []."""
        num_targets = len(targets.positions)
        labels = targets.labels
        if num_targets == 0:
            # A mean over no labels is NaN. One label, weighted 0, gives 0 with a graph instead.
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

    def check(self, vocab_size: int) -> None:
        """Raises ValueError unless the sum of 24 targets is that of the first 9 and that of the others."""
        positions, sums = torch.arange(24), []
        logits: Any = torch.arange(24.0 * vocab_size).sin().view(1, 24, vocab_size)
        if hasattr(self._loss_fn, "num_output_chunks"):
            logits = list(logits.chunk(self._loss_fn.num_output_chunks, dim=1))
        for kept in (positions >= 0, positions < 9, positions >= 9):
            labels = (1 + positions % (vocab_size - 1)).where(kept, self.ignore_index)
            targets = Targets(labels[None], (labels != self.ignore_index).nonzero().squeeze(1))
            with naming("loss"):
                summed = self(logits, targets)
                check_sums(summed, 1)
                sums.append(float(summed))
        if not math.isclose(sums[0], sums[1] + sums[2], rel_tol=1e-4):
            raise ValueError(
                f"loss: {type(self._loss_fn).__name__} is no mean over target tokens: the sum of 24 is {sums[0]:g}, "
                f"those of 9 and 15 are {sums[1]:g} and {sums[2]:g}; set it to recipe_utils.losses.LinearCrossEntropyLoss"
            )


def compile_loss(loss_fn: Any) -> None:
    """Compiles a loss's arithmetic on a chunk of logits, in place, without the loop over chunks.

    A loss compiled as a whole would be recompiled for each number of targets. Not for a stock loss
    without chunks. ``TORCH_COMPILE_BACKEND`` is the backend, as in torchtune.
    """
    if hasattr(loss_fn, "compile_chunks"):
        loss_fn.compile_chunks(os.environ.get("TORCH_COMPILE_BACKEND", "inductor"))
    elif hasattr(loss_fn, "num_output_chunks") and not hasattr(loss_fn, "takes_hidden_states"):
        configure_compiler()
        training.compile_loss(loss_fn, verbose=False)
