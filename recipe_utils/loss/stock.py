"""torchtune's and PyTorch's loss components, as sums over target tokens."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from recipe_utils.data.loader.microbatch import Targets


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
