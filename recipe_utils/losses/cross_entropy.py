"""Output projection and cross-entropy in one loss module."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from recipe_utils.losses.chunks import ChunkedLoss, OutputLayer, compiled_for_all_lengths
from recipe_utils.update_steps.step import Targets


class LinearCrossEntropyLoss(ChunkedLoss):
    """Output projection and cross-entropy, summed over target tokens and computed in chunks.

    For the arguments see :class:`recipe_utils.losses.chunks.ChunkedLoss`; a chunk takes
    ``tokens_per_chunk * v`` fp32 numbers.
    """

    columns: ClassVar[Mapping[str, float | None]] = {"weights": 1.0}
    divisor = "weights"

    def __init__(self, tokens_per_chunk: int = 2048, num_output_chunks: int = 8, ignore_index: int = -100) -> None:
        super().__init__(tokens_per_chunk, num_output_chunks, ignore_index, "loss")
        self._cross_entropy = _cross_entropy

    def compile_chunks(self, backend: Any) -> None:
        """Compiles the arithmetic on logits with ``torch.compile``, once for chunks of any length."""
        self._cross_entropy = compiled_for_all_lengths(_cross_entropy, backend)

    def forward(self, output: OutputLayer, hidden: Tensor, targets: Targets, backward_in_parts: bool = False) -> Tensor:
        """Returns the loss summed over the targets [nats], shape [], at least fp32; 0 without targets.

        For the arguments see :mod:`recipe_utils.losses.attach`.
        """
        hidden, labels = self.at_targets(hidden, targets)
        # Weights that are all 1 would only cost a product.
        weights = None if "weights" in targets.defaults else targets.values.get("weights")
        by_target = self.new_losses(hidden)

        def chunk_loss(logits: Tensor, rows: slice, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
            given = [logits]
            del logits  # a second reference would keep them alive longer
            of_rows = None if weights is None else weights[rows]
            arguments = labels[rows], needs_gradient, of_rows
            sums, gradient, losses = self._cross_entropy(given.pop(), *arguments)
            if by_target is not None:
                by_target[rows] = losses
            return sums, gradient

        sums = self.sum_over_chunks(output, hidden, chunk_loss, 1, backward_in_parts)
        self.record_losses(by_target, targets)
        return sums.squeeze(0)


def _cross_entropy(
    logits: Tensor, labels: Tensor, needs_gradient: bool, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the sum [1], its gradient for the logits [c, v] of c tokens, and losses [c] without ``weights`` [c]."""
    log_probs = F.log_softmax(logits, dim=-1)
    del logits  # frees them early
    label = labels.unsqueeze(1)
    losses = -log_probs.gather(1, label)
    of_target = None if weights is None else weights.to(losses.dtype).unsqueeze(1)
    sums = (losses if of_target is None else of_target * losses).sum().view(1)
    if not needs_gradient:
        return sums, None, losses.squeeze(1)
    # d loss / d logits = softmax(logits) - one_hot(label)
    gradient = log_probs.exp_()
    gradient.scatter_add_(1, label, gradient.new_full((), -1).expand_as(label))
    if of_target is not None:
        gradient.mul_(of_target)
    return sums, gradient, losses.squeeze(1)
