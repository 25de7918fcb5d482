"""Attention kernels for packed rows of both libraries, their requirements, and the choice of one.

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

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from recipe_utils.text.limits import Kernel, Layout, PackedAttention

NAMES = {"varlen": "FlashAttention", "flex": "flex attention"}
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
    name = NAMES[kernel]
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
