"""How fast a machine multiplies matrices, and what of that a training needs."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import config as torchtune_config
from torchtune.modules import TransformerDecoder

from recipe_utils.benchmark.gpu.flops import decoder_flops
from recipe_utils.benchmark.gpu.measure import median_seconds
from recipe_utils.benchmark.peer_configs import Peer
from recipe_utils.benchmark.peers import TEXT
from recipe_utils.benchmark.start_adapters import adapters_in
from recipe_utils.benchmark.token_audit import StepContents
from recipe_utils.model.build.build import ModelSettings, build_on_meta
from recipe_utils.model.build.sizes import num_outputs

_ROWS = 2048
"""Tokens that a product is of."""
_MOST_FLOPS_ON_CPU = 4e10
"""Of one product; of larger weights there are fewer rows."""


class Product(NamedTuple):
    """[m, k] @ [k, n], or with the left one transposed in memory, as a weight's gradient is computed."""

    m: int
    k: int
    n: int
    is_transposed: bool = False

    @property
    def name(self) -> str:
        """As it stands in the results."""
        return f"{self.m}x{self.k}x{self.n}" + (" left transposed" if self.is_transposed else "")

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.k * self.n


def tflops(
    product: Product, device: torch.device, dtype: torch.dtype, num_warm_up: int, num_timed: int
) -> float:
    """TFLOP/s of the median of some products.

    Args:
        product: of random matrices.
        device: to measure.
        dtype: of the matrices.
        num_warm_up: products that are not timed.
        num_timed: those that are.
    """
    m, k, n, is_transposed = product
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    left = torch.randn(*((k, m) if is_transposed else (m, k)), **options)
    if is_transposed:
        left = left.t()
    right = torch.randn(k, n, **options)
    out = torch.empty(m, n, **options)
    seconds = median_seconds(lambda: torch.mm(left, right, out=out), device, num_warm_up, num_timed)
    return product.flops / seconds / 1e12


def products_of(model: nn.Module, is_on_cpu: bool) -> list[Product]:
    """One of each shape of a decoder's weights, forward and for its gradient, and one of square matrices.

    Args:
        model: a torchtune decoder, in any place.
        is_on_cpu: fewer rows where the weights are large.
    """
    decoder: Any = getattr(model, "decoder", model)
    shapes = {tuple(p.shape) for p in decoder.layers.parameters() if p.dim() == 2}
    shapes.add((num_outputs(decoder), decoder.tok_embeddings.embedding_dim))
    found = [Product(_ROWS, _ROWS, _ROWS)]
    for n, k in sorted(shapes):
        rows = min(_ROWS, max(int(_MOST_FLOPS_ON_CPU / (2 * n * k)), 1)) if is_on_cpu else _ROWS
        found += [Product(rows, k, n), Product(n, rows, k, is_transposed=True)]
    return found


def measure_products(config: DictConfig) -> dict[str, float]:
    """TFLOP/s of this process by product, in a config's ``dtype`` on its ``device``, with as many threads as now."""
    device = torch.device(config.device)
    dtype = ModelSettings(config.dtype).torch_dtype
    return {
        product.name: tflops(product, device, dtype, num_warm_up=2, num_timed=7)
        for product in products_of(_on_meta(config), device.type == "cpu")
    }


def peak_of(ranks: Sequence[Mapping[str, float]]) -> float:
    """TFLOP/s of all ranks together in the product that they are fastest in.

    Args:
        ranks: what each has measured at the same time.
    """
    return max(sum(of_rank[name] for of_rank in ranks) for name in ranks[0])


def useful_flops(peer: Peer, contents: Sequence[StepContents]) -> list[float | None]:
    """What each update step's samples need; see :func:`recipe_utils.benchmark.gpu.flops.decoder_flops`.

    None where less or more is needed than a forward and backward of all weights: with adapters, of pairs, with a
    teacher; or where the model is no decoder of torchtune's.
    """
    if peer.recipe != TEXT or adapters_in(peer.config).modules:
        return [None] * len(contents)
    model = _on_meta(OmegaConf.create(peer.config))
    if not isinstance(getattr(model, "decoder", model), TransformerDecoder):
        return [None] * len(contents)
    return [
        decoder_flops(model, each.document_lengths, each.num_target_tokens).total
        for each in contents
    ]


def _on_meta(config: DictConfig) -> nn.Module:
    make_model = partial(torchtune_config.instantiate, config.model)
    return build_on_meta(make_model, ModelSettings())
