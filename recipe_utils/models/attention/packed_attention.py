"""Attention of packed rows that a model computes, with the kernel that :func:`.choose_kernel` chooses for it."""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchtune.modules import MultiHeadAttention, TransformerSelfAttentionLayer

from recipe_utils.model_kinds import text_decoder
from recipe_utils.models.attention.kernels import NAMES, AttentionNeeds, choose_kernel
from recipe_utils.models.transformers.interface import DecoderOfTransformers
from recipe_utils.text.limits import Kernel, Layout, PackedAttention
from recipe_utils.torchtune_names import log_rank_zero


def self_attentions(model: nn.Module) -> list[Any]:
    """Returns the self-attention of each layer."""
    return [layer.attn for layer in model.modules() if isinstance(layer, TransformerSelfAttentionLayer)]


def other_attention(model: nn.Module) -> str | None:
    """Returns the type of a self-attention that is not torchtune's, and needs a dense mask; None if there is none."""
    if isinstance(model, DecoderOfTransformers):
        return None
    types = [type(module) for module in self_attentions(model)] or [type(model)]
    return next((kind.__name__ for kind in types if kind is not MultiHeadAttention), None)


def attention_of(
    model: nn.Module, device: torch.device, configured: Kernel | None = None, tensor_parallel_dim: int = 1
) -> PackedAttention:
    """Returns the capability of ``model``, whole or a stage in its compute precision, on ``device``.

    On CUDA its kernel is the ``configured`` one (``packed_attention``); by default ``varlen``, or
    ``flex`` if FlashAttention does not support the model or is not deterministic enough. Decoders of
    transformers are compared with it on the device: if it is not exact, ``by_document`` replaces it, with
    a warning, and if that is not exact either, rows cannot be packed.
    """
    # Heads that ranks of a row divide among themselves, by the key that a user would change.
    decoder = text_decoder(model)
    num_heads = {"model.num_heads": getattr(decoder, "num_heads", 0)}
    if tensor_parallel_dim > 1:
        num_heads = {"model.num_heads / tensor_parallel_dim": decoder.num_heads // tensor_parallel_dim}

    # The kernel: of another library's attention a dense mask, of transformers one that is compared on the device.
    runs_by_document = False
    other = other_attention(model)
    if other is not None:
        chosen = PackedAttention("dense", f"{other} supports only a mask [b, s, s]")
    elif isinstance(model, DecoderOfTransformers):
        chosen = _exact_on(device, model, configured)
        # Its attention repeats keys by a number of its own, so they are not repeated for more ranks.
        num_heads["model.num_key_value_heads"] = model.num_kv_heads
        runs_by_document = bool(model.check.modules)
    else:
        attentions = self_attentions(model)
        needs = AttentionNeeds(
            next(model.parameters()).dtype,
            frozenset((attention.head_dim, attention.head_dim) for attention in attentions),
            max((float(attention.attn_dropout) for attention in attentions), default=0.0),
        )
        chosen = choose_kernel(needs, device, configured)

    return replace(chosen, other_attention=other, runs_by_document=runs_by_document, num_heads=tuple(num_heads.items()))


def _exact_on(device: torch.device, decoder: DecoderOfTransformers, configured: Kernel | None) -> PackedAttention:
    """Returns the capability of a decoder of transformers, with a kernel that is exact on ``device``."""
    chosen = choose_kernel(decoder.attention_needs(), device, configured)
    refused: dict[Layout, str] = {**chosen.refused, **decoder.refused_layouts()}
    if device.type == "cuda" and decoder.error_on is not None and "packed" not in refused:
        error, name = decoder.error_on(device, chosen.kernel), type(decoder.model).__name__
        if error is not None and chosen.kernel in NAMES:
            text = f"{chosen.kernel} computes other gradients of {name} in packed rows: {error}"
            log_rank_zero(f"{text}; by_document is used instead", logging.WARNING)
            chosen = replace(chosen, kernel="by_document", why=text)
            error = decoder.error_on(device, chosen.kernel)
        if error is not None:
            refused["packed"] = (
                f"microbatching=packed: {name} computes other gradients in packed rows on this device: {error}; set "
                "microbatching=least_padding"
            )
    return replace(chosen, refused=refused)
