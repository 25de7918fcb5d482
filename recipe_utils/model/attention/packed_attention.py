"""Attention kernels for packed rows of both libraries, and their requirements.

| kernel | computes | needs |
| --- | --- | --- |
| ``by_document`` | scaled_dot_product_attention, document by document | nothing; one kernel per document and layer |
| ``varlen`` | FlashAttention over all documents of a microbatch at once | CUDA, bf16, a supported head width; causal masks and sliding windows |
| ``flex`` | flex attention with a block mask | CUDA, Triton, few different row lengths |
| ``dense`` | the model's own attention with a mask [b, s, s] | nothing; attention that cannot be split by document |
"""

import importlib
import importlib.util
import logging
import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torchtune.modules import MultiHeadAttention, TransformerSelfAttentionLayer
from torchtune.utils import get_logger, log_rank_zero

from recipe_utils.data.text.documents import Documents
from recipe_utils.settings.problems import ConfigError

_log = get_logger("INFO")

Kernel = Literal["varlen", "flex", "by_document", "dense"]

_NAMES = {"varlen": "FlashAttention", "flex": "flex attention"}
_DTYPES = {
    "varlen": (torch.bfloat16, torch.float16),
    "flex": (torch.bfloat16, torch.float16, torch.float32),
}
_RECOMPILE_LIMIT = 64
"""Variants per compiled function: row lengths, times training and validation, times models."""


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


class PackedAttention(NamedTuple):
    """Attention of a model within the documents of packed rows."""

    kernel: Kernel
    why: str
    """Reason, for the log."""
    problem: str | None = None
    """Reason that it is not supported, and keys to set instead; None if it is."""
    kernel_with_shared_prefixes: Kernel | None = None
    """Kernel of prefix-shared pairs; None for the same."""
    problem_with_shared_prefixes: str | None = None
    """Reason that prefix-shared pairs are not supported."""

    def with_shared_prefixes(self) -> "PackedAttention":
        """Returns the attention for a microbatch with prefix-shared pairs."""
        kernel, why = self.kernel_with_shared_prefixes, self.why
        if kernel is not None:
            why = f"pairs share prefixes, and {self.kernel} has no mask that hides one answer from the other"
        problem = self.problem or self.problem_with_shared_prefixes
        return PackedAttention(kernel or self.kernel, why, problem)

    def kernel_of(self, documents: Documents) -> Kernel:
        """Returns the kernel of a microbatch; logs it once on an accelerator. Raises ConfigError if it is not supported."""
        own = self if documents.segments is None else self.with_shared_prefixes()
        if own.problem is not None:
            raise ConfigError(own.problem)
        if documents.boundaries.device.type != "cpu":
            _log_once(own.kernel, own.why)
        return own.kernel


@cache
def _log_once(kernel: Kernel, why: str) -> None:
    log_rank_zero(_log, f"Attention of packed rows: {kernel}, because {why}")


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
    ``flex`` if FlashAttention does not support the model or is not deterministic enough. Decoders of
    transformers are compared with it on the device: if it is not exact, ``by_document`` replaces it, with
    a warning, and if that is not exact either, rows cannot be packed.
    """
    other = other_attention(model)
    if other is not None:
        return PackedAttention("dense", f"{other} supports only a mask [b, s, s]")
    configured: Any = getattr(model, "packed_attention", None)
    if not hasattr(model, "proof"):
        attentions = self_attentions(model)
        needs = AttentionNeeds(
            next(model.parameters()).dtype,
            frozenset((each.head_dim, each.head_dim) for each in attentions),
            max((float(each.attn_dropout) for each in attentions), default=0.0),
        )
        return choose_kernel(needs, device, configured)
    decoder: Any = model
    chosen = choose_kernel(
        decoder.attention_needs, device, configured, shares_prefixes_by_mask=True
    )
    problem, of_pairs = decoder.packing_problems()
    problem = problem or chosen.problem
    if device.type == "cuda" and problem is None:
        error, name = decoder.error_on(device, chosen.kernel), type(decoder.model).__name__
        if error is not None and chosen.kernel in _NAMES:
            text = f"{chosen.kernel} computes other gradients of {name} in packed rows: {error}"
            log_rank_zero(_log, f"{text}; by_document is used instead", logging.WARNING)
            chosen = chosen._replace(kernel="by_document", why=text)
            error = decoder.error_on(device, chosen.kernel)
        if error is not None:
            problem = (
                f"microbatching=packed: {name} computes other gradients in packed rows on this device: {error}; set "
                "microbatching=least_padding"
            )
    of_pairs = of_pairs or chosen.problem_with_shared_prefixes
    return chosen._replace(problem=problem, problem_with_shared_prefixes=of_pairs)


def choose_kernel(
    needs: AttentionNeeds,
    device: torch.device,
    configured: Kernel | None = None,
    shares_prefixes_by_mask: bool = False,
) -> PackedAttention:
    """Returns the attention for what a model needs, on a device; a pure function but for Triton and capabilities.

    With ``shares_prefixes_by_mask`` prefix-shared pairs need a mask, also on a CPU.
    """
    if not needs.can_split:
        return PackedAttention(
            "dense", "it was not proved that its attention computes documents one by one"
        )
    if device.type != "cuda":
        why = f"the device is {device.type}"
        of_pairs: Kernel | None = "dense" if shares_prefixes_by_mask else None
        return PackedAttention("by_document", why, None, of_pairs)

    against_varlen = _reason_against("varlen", needs, device)
    against_flex = _reason_against("flex", needs, device)
    kernel, why = _default_kernel(against_varlen, against_flex)
    if configured is not None:
        kernel, why = configured, "packed_attention is set to it"
    key = f"packed_attention={configured or 'null'}: "
    if kernel == "flex":
        reason = "" if configured else f"{why}, and "
        return PackedAttention(kernel, why, _problem_of_flex(key + reason, against_flex))
    problem = problem_of_pairs = of_pairs = None
    if shares_prefixes_by_mask and (against_flex or missing_for_triton()):
        of_pairs = "dense"
    elif shares_prefixes_by_mask or kernel == "varlen":
        text = f"{key}pairs with prefix_sharing use flex attention, and "
        of_pairs, problem_of_pairs = "flex", _problem_of_flex(text, against_flex)
    if kernel == "varlen" and against_varlen is not None:
        problem = f"{key}{against_varlen}; set packed_attention=flex, or remove the key"
    return PackedAttention(kernel, why, problem, of_pairs, problem_of_pairs)


def _reason_against(
    kernel: Literal["varlen", "flex"], needs: AttentionNeeds, device: torch.device
) -> str | None:
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


def _default_kernel(against_varlen: str | None, against_flex: str | None) -> tuple[Kernel, str]:
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if against_varlen is None and not is_deterministic:
        return "varlen", "FlashAttention supports the model"
    if against_flex is not None:
        return "by_document", against_flex
    # FlashAttention has a deterministic backward for "error", not for "warn" (attention_backward.cu).
    why = "cudnn_deterministic_mode is set, and FlashAttention's backward adds in any order"
    return "flex", against_varlen or why


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
