"""Attention kernels for packed rows of both libraries, and their requirements.

| kernel | computes | needs |
| --- | --- | --- |
| ``by_document`` | scaled_dot_product_attention, document by document | nothing; one kernel per document and layer |
| ``varlen`` | FlashAttention over all documents of a microbatch at once | CUDA, bf16, a supported head width; causal masks and sliding windows |
| ``flex`` | flex attention with a block mask | CUDA, Triton, few different row lengths |
| ``dense`` | the model's own attention with a mask [b, s, s] | nothing; attention that cannot be split by document |

Example: documents of 5, 3, 9 and 2 tokens are a row of 19. ``dense`` computes the scores of 19 x 19 = 361 pairs,
``by_document`` those of 25 + 9 + 81 + 4 = 119 with four kernels per layer, ``varlen`` the same with one, and ``flex``
those of all blocks of 128 x 128 with a pair of one document.
"""

import importlib
import importlib.util
import logging
import os
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torchtune.modules import MultiHeadAttention, TransformerSelfAttentionLayer

from recipe_utils.model_kinds import text_decoder
from recipe_utils.models.transformers import transformers_decoder
from recipe_utils.text.limits import Kernel, Layout, PackedAttention
from recipe_utils.torchtune_names import log_rank_zero

if TYPE_CHECKING:
    from recipe_utils.models.transformers.decoder import Decoder

_NAMES = {"varlen": "FlashAttention", "flex": "flex attention"}
_DTYPES = {"varlen": (torch.bfloat16, torch.float16), "flex": (torch.bfloat16, torch.float16, torch.float32)}


class AttentionNeeds(NamedTuple):
    """Properties of a model's attention that not every kernel supports."""

    dtype: torch.dtype
    head_dims: frozenset[tuple[int, int]]
    """Widths of keys and values."""
    dropout: float = 0.0
    others: frozenset[str] = frozenset()
    """Names of transformers' arguments (``softcap``, ``s_aux``, ``position_bias``), and ``other masks``
    than causal ones and sliding windows."""
    can_split: bool = True
    """False if documents are kept apart by masks [b, s, s] only."""
    has_flex: bool = True
    has_flash: bool = True


def self_attentions(model: nn.Module) -> list[Any]:
    """Returns the self-attention of each layer."""
    return [layer.attn for layer in model.modules() if isinstance(layer, TransformerSelfAttentionLayer)]


def other_attention(model: nn.Module) -> str | None:
    """Returns the type of a self-attention that is not torchtune's, and needs a dense mask; None if there is none."""
    if transformers_decoder(model) is not None:
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
    elif (of_transformers := transformers_decoder(model)) is not None:
        chosen = _exact_on(device, of_transformers, configured)
        # Its attention repeats keys by a number of its own, so they are not repeated for more ranks.
        num_heads["model.num_key_value_heads"] = of_transformers.num_kv_heads
        runs_by_document = bool(of_transformers.check.modules)
    else:
        attentions = self_attentions(model)
        needs = AttentionNeeds(
            next(model.parameters()).dtype,
            frozenset((attention.head_dim, attention.head_dim) for attention in attentions),
            max((float(attention.attn_dropout) for attention in attentions), default=0.0),
        )
        chosen = choose_kernel(needs, device, configured)

    return replace(chosen, other_attention=other, runs_by_document=runs_by_document, num_heads=tuple(num_heads.items()))


def _exact_on(device: torch.device, decoder: "Decoder", configured: Kernel | None) -> PackedAttention:
    """Returns the capability of a decoder of transformers, with a kernel that is exact on ``device``."""
    chosen = choose_kernel(decoder.attention_needs(), device, configured)
    refused: dict[Layout, str] = {**chosen.refused, **decoder.refused_layouts()}
    if device.type == "cuda" and decoder.error_on is not None and "packed" not in refused:
        error, name = decoder.error_on(device, chosen.kernel), type(decoder.model).__name__
        if error is not None and chosen.kernel in _NAMES:
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


def choose_kernel(needs: AttentionNeeds, device: torch.device, configured: Kernel | None = None) -> PackedAttention:
    """Returns the attention for what a model needs, on a device; a pure function but for Triton and capabilities."""
    if not needs.can_split:
        return PackedAttention("dense", "it was not proved that its attention computes documents one by one")
    if device.type != "cuda":
        return PackedAttention("by_document", f"the device is {device.type}")

    # The fastest kernel that supports the model, or the configured one.
    against_varlen = _reason_against("varlen", needs, device)
    against_flex = _reason_against("flex", needs, device)
    kernel: Kernel
    if configured is not None:
        kernel, why = configured, "packed_attention is set to it"
    elif against_varlen is None and not torch.are_deterministic_algorithms_enabled():
        kernel, why = "varlen", "FlashAttention supports the model"
    elif against_flex is not None:
        kernel, why = "by_document", against_flex
    else:
        # FlashAttention has a deterministic backward for "error", not for "warn" (attention_backward.cu).
        mode = "cudnn_deterministic_mode is set, and FlashAttention's backward adds in any order"
        kernel, why = "flex", against_varlen or mode

    # Layouts that it cannot compute here, with the reason: an error only once rows are packed.
    key = f"packed_attention={configured or 'null'}: "
    kernel_of_trees: Kernel | None = None
    refused = dict[Layout, str]()
    missing = missing_for_triton()
    if kernel == "flex":
        obstacle, remedy = against_flex, "set packed_attention=by_document"
        if obstacle is None and missing is not None:
            obstacle = f"flex attention compiles with Triton, which needs {missing}"
            remedy = f"install that, or {remedy}"
        if obstacle is not None:
            reason = "" if configured else f"{why}, and "
            refused["packed"] = f"{key}{reason}{obstacle}; {remedy}"
    elif kernel == "varlen":
        kernel_of_trees = "by_document" if against_flex or missing else "flex"
        if against_varlen is not None:
            refused["packed"] = f"{key}{against_varlen}; set packed_attention=flex, or remove the key"
    return PackedAttention(kernel, why, kernel_of_trees, refused)


def _reason_against(kernel: Literal["varlen", "flex"], needs: AttentionNeeds, device: torch.device) -> str | None:
    """Returns the reason that a kernel rejects a model, if any (flash_attn/flash_api.cpp at 03b7c19)."""
    name = _NAMES[kernel]
    if needs.dtype not in _DTYPES[kernel]:
        return f"{name} does not compute in {str(needs.dtype).removeprefix('torch.')}"
    if needs.dropout > 0:
        return f"{name} does not support attn_dropout={needs.dropout}"
    if kernel == "flex":
        return None if needs.has_flex else f"the model does not support {name}"
    if not needs.has_flash or needs.others:
        return f"{name} does not support its {', '.join(sorted(needs.others)) or 'attention'}"
    for head_dim, width in sorted(needs.head_dims):
        if head_dim != width:
            return f"{name} does not support keys of width {head_dim} and values of width {width}"
        if head_dim % 8 or head_dim > 256:
            return f"{name} does not support heads of width {head_dim}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{name} needs a GPU of compute capability 8.0"
    return None


def missing_for_triton() -> str | None:
    """Returns the first requirement of Triton that this machine lacks, if any.

    Triton compiles a C launcher for each kernel (triton/runtime/build.py).
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if not any(shutil.which(compiler) for compiler in compilers):
        return f"a C compiler ({' or '.join(compilers)} on PATH)"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"Python's headers ({header})"
    return None
