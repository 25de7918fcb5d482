"""Output projection and cross-entropy in one loss module."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules.tied_linear import TiedLinear

from recipe_utils.data.loader.microbatch import Targets
from recipe_utils.loss.chunks import check_chunks, compiled_for_all_lengths, sum_over_chunks


class LinearCrossEntropyLoss(nn.Module):
    """Output projection and cross-entropy, summed over target tokens and computed in chunks.

    Args:
        tokens_per_chunk: target tokens projected at once; takes ``tokens_per_chunk * v`` fp32
            numbers. See :func:`recipe_utils.loss.chunks.sum_over_chunks`.
        num_output_chunks: number of chunks if the output layer is called as a module.
        ignore_index: label of positions that are no targets.
    """

    takes_hidden_states = True

    def __init__(
        self, tokens_per_chunk: int = 2048, num_output_chunks: int = 8, ignore_index: int = -100
    ) -> None:
        super().__init__()
        sizes = {"tokens_per_chunk": tokens_per_chunk, "num_output_chunks": num_output_chunks}
        check_chunks("loss", **sizes)
        self.tokens_per_chunk = tokens_per_chunk
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index
        self._cross_entropy = _cross_entropy

    def compile_chunks(self, backend: Any) -> None:
        """Compiles the arithmetic on logits with ``torch.compile``, once for chunks of any length."""
        self._cross_entropy = compiled_for_all_lengths(_cross_entropy, backend)

    def forward(
        self,
        output: nn.Module | TiedLinear,
        hidden: Tensor,
        targets: Targets,
        backward_in_parts: bool = False,
    ) -> Tensor:
        """Returns the loss summed over the targets [nats], shape [], at least fp32; 0 without targets.

        For the arguments see :mod:`recipe_utils.loss.attach_loss`.
        """
        labels = targets.labels.flatten().index_select(0, targets.positions)

        def chunk_loss(
            logits: Tensor, rows: slice, needs_gradient: bool
        ) -> tuple[Tensor, Tensor | None]:
            given = [logits]
            del logits  # a second reference would keep them alive longer
            return self._cross_entropy(given.pop(), labels[rows], needs_gradient)

        return sum_over_chunks(
            output,
            hidden.flatten(0, 1).index_select(0, targets.positions),
            chunk_loss,
            num_sums=1,
            tokens_per_chunk=self.tokens_per_chunk,
            num_output_chunks=self.num_output_chunks,
            backward_in_parts=backward_in_parts,
        ).squeeze(0)


def _cross_entropy(
    logits: Tensor, labels: Tensor, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the sum [1] and its gradient for the logits [c, v] of c tokens, for labels [c]."""
    log_probs = F.log_softmax(logits, dim=-1)
    del logits  # frees them early
    label = labels.unsqueeze(1)
    loss = -log_probs.gather(1, label).sum().view(1)
    if not needs_gradient:
        return loss, None
    # d loss / d logits = softmax(logits) - one_hot(label)
    gradient = log_probs.exp_()
    return loss, gradient.scatter_add_(1, label, gradient.new_full((), -1).expand_as(label))
