"""Attention kernels for packed rows, and their requirements.

| kernel | computes | needs |
| --- | --- | --- |
| ``by_document`` | scaled_dot_product_attention, document by document | nothing; one kernel per document and layer |
| ``varlen`` | FlashAttention over all documents of a microbatch at once | CUDA, bf16, a supported head width |
| ``flex`` | flex attention with a block mask | CUDA, Triton, few different row lengths |
| ``dense`` | the model's own attention with a mask [b, s, s] | an attention other than torchtune's |
| ``transformers`` | the model's own attention, as proved at start-up | a model of transformers |
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

Kernel = Literal["varlen", "flex", "by_document", "dense", "transformers"]

_DTYPES = {
    "varlen": (torch.bfloat16, torch.float16),
    "flex": (torch.bfloat16, torch.float16, torch.float32),
}
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
        if self.kernel == "transformers":
            return self._replace(problem=self.problem or self.problem_with_shared_prefixes)
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
    if hasattr(model, "proof"):
        return None
    types = [type(module) for module in self_attentions(model)] or [type(model)]
    return next((each.__name__ for each in types if each is not MultiHeadAttention), None)


def select_kernel(model: nn.Module, device: torch.device) -> PackedAttention:
    """Selects the attention of ``model``, whole or a stage in its compute precision, within documents.

    On CUDA this is the configured kernel (``model.packed_attention``); by default ``varlen``, or
    ``flex`` if FlashAttention does not support the model or is not deterministic enough.
    """
    proof: Any = getattr(model, "proof", None)
    if proof is not None:
        text = f"microbatching=packed: {proof.problem} mixes the documents of a row; set microbatching=least_padding"
        shared = None
        if not proof.shares_prefixes:
            of_pairs = f"{', '.join(proof.modules)} computes one document after the other"
            if not proof.modules:
                of_pairs = (
                    "it does not compute pairs with a shared prefix as it computes them without"
                )
            name = type(model.model).__name__
            shared = f"prefix_sharing=True: not with {name}: {of_pairs}; set prefix_sharing=False"
        why = "it is a model of transformers"
        return PackedAttention("transformers", why, text if proof.problem else None, shared)
    other = other_attention(model)
    if other is not None:
        return PackedAttention("dense", f"{other} supports only a mask [b, s, s]")
    if device.type != "cuda":
        return PackedAttention("by_document", f"the device is {device.type}")

    configured: Any = getattr(model, "packed_attention", None)
    against_varlen = _obstacle("varlen", model, device)
    against_flex = _obstacle("flex", model, device)
    kernel, why = configured, "packed_attention is set to it"
    if configured is None:
        kernel, why = _default_kernel(against_varlen, against_flex)
    key = f"packed_attention={configured or 'null'}: "
    if kernel == "by_document":
        return PackedAttention(kernel, why)
    if kernel == "flex":
        reason = "" if configured else f"{why}, and "
        return PackedAttention(kernel, why, _problem_of_flex(key + reason, against_flex))
    problem = None
    if against_varlen is not None:
        problem = f"{key}{against_varlen}; set packed_attention=flex, or remove the key"
    of_pairs = f"{key}pairs with prefix_sharing use flex attention, and "
    return PackedAttention(kernel, why, problem, _problem_of_flex(of_pairs, against_flex))


def _obstacle(
    kernel: Literal["varlen", "flex"], model: nn.Module, device: torch.device
) -> str | None:
    """Returns the reason that a kernel rejects a model, if any (flash_attn/flash_api.cpp at 03b7c19)."""
    name = {"varlen": "FlashAttention", "flex": "flex attention"}[kernel]
    attentions = self_attentions(model)
    dtype = next(model.parameters()).dtype
    if dtype not in _DTYPES[kernel]:
        return f"{name} does not compute in {str(dtype).removeprefix('torch.')}"
    dropout = max(float(attention.attn_dropout) for attention in attentions)
    if dropout > 0:
        return f"{name} does not support attn_dropout={dropout}"
    if kernel == "flex":
        return None
    for head_dim in {attention.head_dim for attention in attentions}:
        if head_dim % 8 or head_dim > 256:
            return f"{name} does not support heads of width {head_dim}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{name} needs a GPU of compute capability 8.0"
    return None


def _default_kernel(against_varlen: str | None, against_flex: str | None) -> tuple[Kernel, str]:
    if against_flex is not None:
        return "by_document", against_flex
    if against_varlen is not None:
        return "flex", against_varlen
    if torch.are_deterministic_algorithms_enabled():
        # FlashAttention has a deterministic backward for "error", not for "warn" (attention_backward.cu).
        why = "cudnn_deterministic_mode is set, and FlashAttention's backward adds in any order"
        return "flex", why
    return "varlen", "FlashAttention supports the model"


def _problem_of_flex(beginning: str, obstacle: str | None) -> str | None:
    """Returns the reason that flex attention is unavailable on this machine or for a model, if any."""
    instead = "set packed_attention=by_document"
    if obstacle is not None:
        return f"{beginning}{obstacle}; {instead}"
    missing = missing_for_triton()
    if missing is None:
        return None
    text = f"flex attention compiles with Triton, which needs {missing}"
    return f"{beginning}{text}; install that, or {instead}"


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
