"""Floating-point operations that a decoder needs, whatever it computes besides."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from recipe_utils.model.build.sizes import num_outputs


class Flops(NamedTuple):
    """Of a forward and backward."""

    matrix: float
    """Of products with weights."""
    attention: float
    """Of products of queries with keys and of their weights with values, causal."""

    @property
    def total(self) -> float:
        """Both."""
        return self.matrix + self.attention


def decoder_flops(model: nn.Module, document_lengths: Iterable[int], num_targets: int) -> Flops:
    """What documents need: 6 per weight and token, and 6 * L * d * n^2 of a document's n tokens in attention.

    A product with a weight takes 2 in the forward and twice as many in the backward (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1). Of embeddings, norms and what is computed again nothing is counted;
    the output layer counts for targets only, where alone it is needed.

    Args:
        model: a torchtune decoder, in any place, not sharded.
        document_lengths: [tokens], without padding.
        num_targets: positions that are projected on the vocabulary.
    """
    decoder: Any = getattr(model, "decoder", model)
    lengths = list(document_lengths)
    num_weights = sum(p.numel() for p in decoder.layers.parameters() if p.dim() > 1)
    width = decoder.num_heads * decoder.head_dim
    of_outputs = num_outputs(decoder) * decoder.tok_embeddings.embedding_dim
    return Flops(
        matrix=6.0 * (num_weights * sum(lengths) + of_outputs * num_targets),
        attention=6.0 * len(decoder.layers) * width * sum(n * n for n in lengths),
    )
