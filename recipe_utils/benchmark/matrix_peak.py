"""FLOP/s of matrix products on a machine, and FLOPs of update steps."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import nn
from torchtune.modules import TransformerDecoder

from recipe_utils.benchmark.baselines.kinds import TEXT
from recipe_utils.benchmark.baselines.start import model_on_meta
from recipe_utils.benchmark.token_audit import StepContents
from recipe_utils.model.adapters.adapters import find_adapters
from recipe_utils.model.build.build import ModelSettings
from recipe_utils.model.build.sizes import num_outputs

_ROWS = 2048
"""Tokens per product."""
_MOST_FLOPS_ON_CPU = 4e10
"""Maximum FLOPs of one product. Larger weights use fewer rows."""


class Product(NamedTuple):
    """Product [m, k] @ [k, n]. In weight gradients the left factor is transposed in memory."""

    m: int
    k: int
    n: int
    is_transposed: bool = False

    @property
    def name(self) -> str:
        """Name in the results."""
        return f"{self.m}x{self.k}x{self.n}" + (" left transposed" if self.is_transposed else "")


def tflops(
    product: Product, device: torch.device, dtype: torch.dtype, num_warm_up: int, num_timed: int
) -> float:
    """Returns the median TFLOP/s of a product of random matrices."""
    m, k, n, is_transposed = product
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    left = torch.randn(k, m, **options).t() if is_transposed else torch.randn(m, k, **options)
    right = torch.randn(k, n, **options)
    out = torch.empty(m, n, **options)
    seconds = median_seconds(lambda: torch.mm(left, right, out=out), device, num_warm_up, num_timed)
    return 2 * m * k * n / seconds / 1e12


def median_seconds(
    call: Callable[[], Any], device: torch.device, num_warm_up: int, num_timed: int
) -> float:
    """Returns the median time of a call, on CUDA between events so that the host can run ahead."""
    for _ in range(num_warm_up):
        call()
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(num_timed):
            call()
            times.append(time.perf_counter())
        return statistics.median(stop - start for start, stop in pairwise(times))
    torch.cuda.synchronize(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_timed + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in pairwise(events))


def products_of(model: nn.Module, is_on_cpu: bool) -> list[Product]:
    """Returns products for each weight shape of a decoder and its gradient, and a square one."""
    decoder: Any = getattr(model, "decoder", model)
    shapes = {tuple(p.shape) for p in decoder.layers.parameters() if p.dim() == 2}
    shapes.add((num_outputs(decoder), decoder.tok_embeddings.embedding_dim))
    found = [Product(_ROWS, _ROWS, _ROWS)]
    for n, k in sorted(shapes):
        rows = min(_ROWS, max(int(_MOST_FLOPS_ON_CPU / (2 * n * k)), 1)) if is_on_cpu else _ROWS
        found += [Product(rows, k, n), Product(n, rows, k, is_transposed=True)]
    return found


def measure_products(config: DictConfig) -> dict[str, float]:
    """Returns TFLOP/s of this process by product, with ``dtype`` and ``device`` of a config."""
    device = torch.device(config.device)
    dtype = ModelSettings(dtype=config.dtype).torch_dtype
    return {
        product.name: tflops(product, device, dtype, num_warm_up=2, num_timed=7)
        for product in products_of(model_on_meta(config), device.type == "cpu")
    }


def peak_of(ranks: Sequence[Mapping[str, float]]) -> float:
    """Returns the total TFLOP/s of the fastest product, measured simultaneously on all ranks."""
    return max(sum(of_rank[name] for of_rank in ranks) for name in ranks[0])


def decoder_flops(
    model: nn.Module, document_lengths: Sequence[int], num_targets: int
) -> tuple[int, int]:
    """Counts the FLOPs of products with weights, and of causal attention, in forward and backward.

    These are 6 per weight and token (2 of them in the forward; Kaplan et al. 2020, arXiv:2001.08361,
    section 2.1), and 6 * L * d * n^2 for attention of n tokens. Embeddings, norms and recomputation
    are excluded; the output layer counts for targets only.
    """
    decoder: Any = getattr(model, "decoder", model)
    num_weights = sum(p.numel() for p in decoder.layers.parameters() if p.dim() > 1)
    width = decoder.num_heads * decoder.head_dim
    of_outputs = num_outputs(decoder) * decoder.tok_embeddings.embedding_dim
    of_weights = 6 * (num_weights * sum(document_lengths) + of_outputs * num_targets)
    of_attention = 6 * len(decoder.layers) * width * sum(n * n for n in document_lengths)
    return of_weights, of_attention


def useful_flops(
    recipe: str, config: Mapping[str, Any], contents: Sequence[StepContents]
) -> list[int | None]:
    """Returns the FLOPs of the samples of each update step; see :func:`decoder_flops`.

    None with adapters, pairs or a teacher, and for models that are not torchtune decoders.
    """
    model = model_on_meta(config)
    is_decoder = isinstance(getattr(model, "decoder", model), TransformerDecoder)
    if recipe != TEXT or not is_decoder or find_adapters(model).modules:
        return [None] * len(contents)
    return [
        sum(decoder_flops(model, each.document_lengths, each.num_target_tokens))
        for each in contents
    ]
