"""Sinkhorn-Knopp's targets over a whole update step, with no more than a chunk of logits at a time.

Targets Q [n, k] of n crops or patches over k prototypes are exp(logits / t) with rows and columns
scaled so that each row sums to 1 and all prototypes get the same total (Cuturi, arXiv:1306.0895;
Caron et al., arXiv:2006.09882, equation 3). After iterations that end with scaling the rows

    Q = softmax(logits / t + dual),    dual [k],

so a row depends on the others only through dual. Each iteration sums k numbers over all rows of all
microbatches and ranks.

Example: of two rows with exp(logits / t) = (4, 1) and (2, 1), the softmax would give the first prototype 1.47 of the 2
crops. Its total is 6 and the other's 2, so dual = (-log 6, -log 2) after one iteration. The targets are (0.57, 0.43)
and (0.40, 0.60), of which the first prototype gets 0.97.

Shapes: n rows, d width of the bottleneck, k prototypes, c rows of a chunk.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_utils.losses.chunks import chunks_of, sum_dtype


@torch.no_grad()
def sinkhorn(
    rows: Sequence[Tensor],
    weight: Tensor,
    temperature: float,
    num_iterations: int = 3,
    group: dist.ProcessGroup | None = None,
    rows_per_chunk: int = 256,
) -> Tensor:
    """Returns the dual variable [k] for all rows of all ranks, at least fp32; zeros if there are no rows.

    Computes with logarithms: exp(logits / t) would overflow at usual temperatures. Each iteration
    scales prototypes, then rows; DINOv3 uses 3 iterations (arXiv:2508.10104).

    ``rows`` are bottlenecks of this rank's microbatches, each [n, d], ``weight`` the prototypes
    [k, d]. All ranks of ``group`` must call this; None is this rank alone.
    """
    dual = weight.new_zeros(len(weight), dtype=sum_dtype(weight))
    for iteration in range(num_iterations):
        # Logarithm of each prototype's total over all rows, with the rows scaled by dual.
        log_total = torch.full_like(dual, float("-inf"))
        for logits in _scaled_logits(rows, weight, temperature, rows_per_chunk):
            if iteration:
                logits -= (logits + dual).logsumexp(1, keepdim=True)
            log_total = torch.logaddexp(log_total, logits.logsumexp(0))
        if group is not None:  # over all ranks
            largest = log_total.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            # If all are minus infinity, their difference would be NaN.
            shift = torch.where(largest.isfinite(), largest, 0)
            total = (log_total - shift).exp_()
            dist.all_reduce(total, group=group)
            log_total = total.log_().add_(shift)
        dual = torch.where(log_total.isfinite(), -log_total, 0)
    return dual


@torch.no_grad()
def num_prototypes_used(
    rows: Sequence[Tensor],
    weight: Tensor,
    temperature: float,
    biases: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Returns the number of prototypes that are the most likely of some row on some rank, [].

    A small number indicates a collapse. ``biases`` are the dual variables [k] of each microbatch;
    for the other arguments see :func:`sinkhorn`.
    """
    is_used = torch.zeros_like(biases[0])
    for bottlenecks, bias in zip(rows, biases, strict=True):
        for logits in _scaled_logits([bottlenecks], weight, temperature):
            is_used[(logits + bias).argmax(1)] = 1
    if group is not None:
        dist.all_reduce(is_used, dist.ReduceOp.MAX, group=group)
    return is_used.sum()


def _scaled_logits(
    rows: Sequence[Tensor], weight: Tensor, temperature: float, rows_per_chunk: int = 256
) -> Iterator[Tensor]:
    """Yields logits / t of each chunk, [c, k], at least fp32, which the caller may overwrite."""
    for bottlenecks in rows:
        for chunk in chunks_of(len(bottlenecks), rows_per_chunk):
            logits = bottlenecks[chunk] @ weight.t()
            yield logits.to(sum_dtype(logits)).div_(temperature)
