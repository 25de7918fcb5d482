"""Attention kernels for packed rows, and their requirements.

| kernel | computes | needs |
| --- | --- | --- |
| ``by_document`` | scaled_dot_product_attention, document by document | nothing; one kernel per document and layer |
| ``varlen`` | FlashAttention over all documents of a microbatch at once | CUDA, bf16, a supported head width |
| ``flex`` | flex attention with a block mask | CUDA, Triton, few different row lengths |
| ``dense`` | the model's own attention with a mask [b, s, s] | an attention other than torchtune's |
"""

import importlib
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torchtune.modules import MultiHeadAttention, TransformerSelfAttentionLayer

Kernel = Literal["varlen", "flex", "by_document", "dense"]

_DTYPES_OF_KERNELS = (torch.bfloat16, torch.float16, torch.float32)
_RECOMPILE_LIMIT = 64
"""Variants per compiled function: row lengths, times training and validation, times models."""


class PackedAttention(NamedTuple):
    """Attention of a model within the documents of packed rows."""

    kernel: Kernel
    why: str
    """Reason, for the log."""
    problem: str | None = None
    """Reason that it is not supported, and keys to set instead; None if it is."""
    problem_with_shared_prefixes: str | None = None
    """The same for prefix-shared pairs, if they take another kernel."""

    def with_shared_prefixes(self) -> "PackedAttention":
        """Returns the attention for a microbatch with prefix-shared pairs."""
        if self.kernel != "varlen":
            return self
        why = "pairs share prefixes, and FlashAttention has no mask that hides one answer from the other"
        return PackedAttention("flex", why, self.problem or self.problem_with_shared_prefixes)


def self_attentions(model: nn.Module) -> list[Any]:
    """Returns the self-attention of each layer."""
    layers = (m for m in model.modules() if isinstance(m, TransformerSelfAttentionLayer))
    return [layer.attn for layer in layers]


def other_attention(model: nn.Module) -> str | None:
    """Returns the type of a self-attention that is not torchtune's, and needs a dense mask; None if there is none."""
    types = [type(module) for module in self_attentions(model)] or [type(model)]
    return next((each.__name__ for each in types if each is not MultiHeadAttention), None)


def select_kernel(model: nn.Module, device: torch.device) -> PackedAttention:
    """Selects the attention of ``model`` within documents on ``device``.

    On CUDA this is the configured kernel (``model.packed_attention``); by default ``varlen``, or
    ``flex`` if FlashAttention does not support the model or is not deterministic enough.

    The model is whole or a stage, in the precision that it computes in.
    """
    other = other_attention(model)
    if other is not None:
        return PackedAttention("dense", f"{other} supports only a mask [b, s, s]")
    if device.type != "cuda":
        return PackedAttention("by_document", f"the device is {device.type}")

    configured: Any = getattr(model, "packed_attention", None)
    dtype = next(model.parameters()).dtype
    dropout = max(float(attention.attn_dropout) for attention in self_attentions(model))
    against_varlen = _against_varlen(model, dtype, dropout, device)
    kernel, why = configured, "packed_attention is set to it"
    if configured is None:
        kernel, why = _default_kernel(dtype, dropout, against_varlen)
    if kernel == "by_document":
        return PackedAttention(kernel, why)
    if kernel == "flex":
        subject = "packed_attention=flex: it"
        if configured is None:
            subject = f"packed_attention=null: it is flex here ({why}), and it"
        return PackedAttention(kernel, why, _problem_of_flex(dtype, dropout, subject))
    problem = None
    if against_varlen is not None:
        problem = (
            f"packed_attention=varlen: {against_varlen}; set packed_attention=flex, or leave it out"
        )
    subject = f"packed_attention={configured or 'null'}: pairs with prefix_sharing take flex attention, which"
    return PackedAttention(kernel, why, problem, _problem_of_flex(dtype, dropout, subject))


def _default_kernel(
    dtype: torch.dtype, dropout: float, against_varlen: str | None
) -> tuple[Kernel, str]:
    if dropout > 0:
        return "by_document", f"the others do not support attn_dropout={dropout}"
    if dtype not in _DTYPES_OF_KERNELS:
        return "by_document", f"the others do not compute in {_name(dtype)}"
    if against_varlen is not None:
        return "flex", against_varlen
    if torch.are_deterministic_algorithms_enabled():
        # FlashAttention has a deterministic backward for "error", not for "warn" (attention_backward.cu).
        why = "cudnn_deterministic_mode is set, and FlashAttention's backward adds in any order"
        return "flex", why
    return "varlen", f"FlashAttention computes in {_name(dtype)}"


def _against_varlen(
    model: nn.Module, dtype: torch.dtype, dropout: float, device: torch.device
) -> str | None:
    """Returns the reason that FlashAttention rejects a model (flash_attn/flash_api.cpp at 03b7c19), if any."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention does not compute in {_name(dtype)}"
    if dropout > 0:
        return f"it has no attn_dropout={dropout}"
    for head_dim in {attention.head_dim for attention in self_attentions(model)}:
        if head_dim % 8 or head_dim > 256:
            return f"FlashAttention does not support heads of width {head_dim}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "FlashAttention needs a GPU of compute capability 8.0"
    return None


def _problem_of_flex(dtype: torch.dtype, dropout: float, subject: str) -> str | None:
    """Returns the reason that flex attention is unavailable, in a sentence about ``subject``, if any."""
    instead = "set packed_attention=by_document"
    if dropout > 0:
        return f"{subject} has no attn_dropout={dropout}; {instead}"
    if dtype not in _DTYPES_OF_KERNELS:
        return f"{subject} does not compute in {_name(dtype)}; {instead}"
    missing = missing_for_triton()
    if missing is not None:
        return f"{subject} compiles with Triton, which needs {missing}; install that, or {instead}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def raise_recompile_limit() -> None:
    """Raises PyTorch's limit of 8 variants per compiled function, beyond which it runs uncompiled.

    Uncompiled flex attention stores all scores [b, h, s, s], several times per layer.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, name, max(getattr(config, name), _RECOMPILE_LIMIT))
