"""What data must know of a model."""

from typing import Any

import torch
from torch import nn

from recipe_utils.data.plan import ATTENTION_SLOWNESS, MicrobatchCost
from recipe_utils.data.text import ModelLimits
from recipe_utils.model.document_mask import other_attention


def limits_of(model: nn.Module, device: torch.device, compiles: bool) -> ModelLimits:
    """What samples, rows and their costs depend on.

    Args:
        model: whole, in any place; may be on the meta device.
        device: that it will compute on.
        compiles: whether its layers will be compiled.
    """
    vocab_size, max_seq_len = vocab_size_and_max_seq_len(model)
    num_row_lengths = None
    if compiles or device.type != "cpu":
        # Compiled code and flex attention are made for each shape that they meet.
        num_row_lengths = 1 if compiles else 4
    return ModelLimits(
        vocab_size,
        max_seq_len,
        MicrobatchCost(equal_attention_length=equal_attention_length(model)),
        other_attention(model),
        num_row_lengths,
    )


def vocab_size_and_max_seq_len(model: nn.Module) -> tuple[int, int]:
    """What samples are checked against: number of token embeddings, longest sequence [tokens]."""
    decoder: Any = getattr(model, "decoder", model)
    # Llama 3.2 Vision embeds its special tokens with a second table.
    tables = [m for m in decoder.tok_embeddings.modules() if isinstance(m, nn.Embedding)]
    return sum(table.num_embeddings for table in tables), decoder.max_seq_len


def equal_attention_length(model: nn.Module) -> float:
    """Of :class:`recipe_utils.data.plan.MicrobatchCost` [tokens]: N / (L * d) over attention's slowness."""
    decoder: Any = getattr(model, "decoder", model)
    num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
    embed_dim = decoder.num_heads * decoder.head_dim
    return num_parameters / (len(decoder.layers) * embed_dim) / ATTENTION_SLOWNESS
