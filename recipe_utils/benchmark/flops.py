"""FLOPs of a decoder's update step, and the speed of a matrix product to compare them with."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.utils.benchmark import Timer
from torchtune import config as torchtune_config
from torchtune import training
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import get_adapter_params

from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.sizes import num_outputs


def decoder_flops(decoder: Any, document_lengths: Sequence[int], num_targets: int) -> tuple[int, int]:
    """Counts the FLOPs of products with weights, and of causal attention, in forward and backward.

    These are 6 per weight and token (2 of them in the forward; Kaplan et al. 2020, arXiv:2001.08361,
    section 2.1), and 6 * L * d * n^2 for attention of n tokens. Embeddings, norms and recomputation
    are excluded; the output layer counts for targets only.
    """
    num_weights = sum(p.numel() for p in decoder.layers.parameters() if p.dim() > 1)
    num_output_weights = num_outputs(decoder) * decoder.tok_embeddings.embedding_dim
    width = decoder.num_heads * decoder.head_dim
    weight_flops = 6 * (num_weights * sum(document_lengths) + num_output_weights * num_targets)
    return weight_flops, 6 * len(decoder.layers) * width * sum(n * n for n in document_lengths)


def countable_decoder(component: Any) -> TransformerDecoder | None:
    """Returns a model on the meta device if :func:`decoder_flops` holds: of torchtune, without adapters or images."""
    decoder = build_on_meta(partial(torchtune_config.instantiate, OmegaConf.create(component)), ModelSettings())
    return decoder if isinstance(decoder, TransformerDecoder) and not get_adapter_params(decoder) else None


def product_rate(device: torch.device, dtype: str) -> tuple[int, float]:
    """Times a product of two random square matrices. Returns their number of rows, and FLOPs per second."""
    size = 8192 if device.type == "cuda" else 1024
    left = torch.randn(size, size, device=device, dtype=training.get_dtype(dtype, device))
    timer = Timer("left @ left", globals={"left": left}, num_threads=torch.get_num_threads())
    return size, 2 * size**3 / timer.blocked_autorange().median
