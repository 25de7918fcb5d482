"""Sinkhorn-Knopp's targets over a whole update step, of which no more than a chunk of logits ever exists.

Targets Q [n, k] of n crops or patches over k prototypes are exp(logits / t) with rows and columns scaled so that
each row sums to 1 and each prototype gets as much as any other (Cuturi, arXiv:1306.0895; Caron et al.,
arXiv:2006.09882, equation 3). After some iterations that end with the rows

    Q = softmax(logits / t + dual),    dual [k],

so dual is all that a row must know of the others. Each iteration needs one sum over all rows for each
prototype, which goes over microbatches and ranks: K numbers each time, whatever the split.

Shapes: n rows, d width of the bottleneck, k prototypes, c rows of a chunk.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_utils.loss.chunks import chunks_of, sum_dtype


@torch.no_grad()
def sinkhorn(
    rows: Sequence[Tensor],
    weight: Tensor,
    temperature: float,
    num_iterations: int = 3,
    group: dist.ProcessGroup | None = None,
    rows_per_chunk: int = 256,
) -> Tensor:
    """Dual [k] of all rows of all ranks, at least fp32; zeros if there is no row.

    Logarithms throughout: exp(logits / t) would overflow at the temperatures in use.

    Args:
        rows: bottlenecks of this rank's microbatches, each [n, d]; any may be empty, or all of them.
        weight: of the prototypes, [k, d].
        temperature: t of the teacher.
        num_iterations: of scaling prototypes, then rows; at least 1. DINOv3 takes 3 (arXiv:2508.10104).
        group: ranks that hold different rows, all of which call this; None for this one alone.
        rows_per_chunk: projected at once.
    """
    dual = weight.new_zeros(len(weight), dtype=sum_dtype(weight))
    for iteration in range(num_iterations):
        # Of each prototype the logarithm of what all rows give it, with the rows scaled as dual says.
        log_total = torch.full_like(dual, float("-inf"))
        for logits in _scaled_logits(rows, weight, temperature, rows_per_chunk):
            if iteration:
                logits -= (logits + dual).logsumexp(1, keepdim=True)
            log_total = torch.logaddexp(log_total, logits.logsumexp(0))
        log_total = _log_sum_over_ranks(log_total, group)
        dual = torch.where(log_total.isfinite(), -log_total, 0)
    return dual


@torch.no_grad()
def num_prototypes_used(
    rows: Sequence[Tensor],
    weight: Tensor,
    temperature: float,
    biases: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    rows_per_chunk: int = 256,
) -> Tensor:
    """Prototypes that are the likeliest of some row on some rank, []; few of many say that a training collapses.

    Args:
        rows: as :func:`sinkhorn` takes them.
        weight: likewise.
        temperature: likewise.
        biases: dual [k] of each microbatch.
        group: likewise.
        rows_per_chunk: likewise.
    """
    is_used = torch.zeros_like(biases[0])
    for each, bias in zip(rows, biases, strict=True):
        for logits in _scaled_logits([each], weight, temperature, rows_per_chunk):
            is_used[(logits + bias).argmax(1)] = 1
    if group is not None:
        dist.all_reduce(is_used, dist.ReduceOp.MAX, group=group)
    return is_used.sum()


def _scaled_logits(
    rows: Sequence[Tensor], weight: Tensor, temperature: float, rows_per_chunk: int
) -> Iterator[Tensor]:
    """Logits / t of each chunk, [c, k], at least fp32, to be worked in."""
    for each in rows:
        for chunk in chunks_of(len(each), rows_per_chunk):
            logits = each[chunk] @ weight.t()
            yield logits.to(sum_dtype(logits)).div_(temperature)


def _log_sum_over_ranks(log_values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Log of the sum of exp over the ranks of a group, entry by entry."""
    if group is None:
        return log_values
    largest = log_values.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    # Where all are minus infinity: their difference would be NaN.
    shift = torch.where(largest.isfinite(), largest, 0)
    total = (log_values - shift).exp_()
    dist.all_reduce(total, group=group)
    return total.log_().add_(shift)
