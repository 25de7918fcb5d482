"""Attention within documents: a token of a packed row attends to preceding tokens of its own document.

In a document that is a tree, it attends to its segment and to that one's ancestors. The model is called with
``document_lengths=Documents([[5, 3, 9, 2]])`` beside the row's 19 tokens. A hook turns them into the ``mask`` that
torchtune's layers pass on: a block mask for flex attention, a dense one, or the documents themselves, which the
replaced attention call of each layer computes one by one or hands to FlashAttention.

Shapes: b rows, s positions per row, h heads, d head width.
"""

import inspect
from collections.abc import Callable
from functools import cache
from types import MappingProxyType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torchtune.modules import MultiHeadAttention

from recipe_utils.compiler import configure_compiler
from recipe_utils.long_rows.exchange import PartMask, RowGroups, heads_of_row, tokens_of_part
from recipe_utils.model_kinds import text_decoder, transformers_decoder
from recipe_utils.models.attention.block_mask import block_mask, dense_mask
from recipe_utils.models.attention.chains import MergedAttention, can_merge, mask_of_chain, parts_of_chains
from recipe_utils.models.attention.packed_attention import attention_of, self_attentions
from recipe_utils.text.documents import Documents


def attend_within_documents(
    model: nn.Module, device: torch.device, max_row_length: int, row_groups: RowGroups = MappingProxyType({})
) -> None:
    """Makes ``model(..., document_lengths=documents)`` attend within documents only, without device synchronizations.

    The kernel is that of :func:`.attention_of`, logged at the first packed row. The forward raises
    ConfigError if rows are packed and this machine or model does not support it.

    ``model`` is not wrapped yet. A decoder rejects rows above its ``max_seq_len``, which is raised to
    ``max_row_length`` [tokens]; positions restart with each document, so only documents must stay
    below the original. ``row_groups`` are those of rows that span ranks.
    """
    attention = attention_of(model, device)
    if attention.kernel != "dense" and transformers_decoder(model) is None:
        for module in self_attentions(model):
            module._attention_call = _within_documents(module._attention_call)
            if attention.kernel == "varlen" or row_groups:
                module.forward = MethodType(_forward(attention.kernel == "varlen"), module)
    if "flex" in (attention.kernel, attention.kernel_of_trees):
        configure_compiler()

    decoder = text_decoder(model)
    decoder.longest_document = decoder.max_seq_len  # its positions end here
    decoder.max_seq_len = max(decoder.max_seq_len, max_row_length)
    if transformers_decoder(model) is not None:
        decoder.attend_within_documents(attention, row_groups)
        return  # its forward takes documents

    def documents_to_mask(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "document_lengths" in kwargs:
            documents = kwargs.pop("document_lengths")
            kernel = attention.kernel_of(documents)
            masks: dict[str, Callable[..., Any]] = {"flex": block_mask, "dense": dense_mask}
            mask: Any = masks[kernel](documents) if kernel in masks else documents
            if documents.num_ranks > 1:
                mask = PartMask(mask, row_groups[documents.num_ranks])
            kwargs["mask"] = mask
        return args, kwargs

    model.register_forward_pre_hook(documents_to_mask, with_kwargs=True)


def _within_documents(attention_call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps ``attention_call``, which computes everything but documents and block masks."""

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout_p: float, is_causal: bool) -> Tensor:
        if isinstance(mask, Documents):
            return _attend_by_document(q, k, v, mask, dropout_p)
        if isinstance(mask, BlockMask):
            return _attend_by_blocks(q, k, v, mask)
        return attention_call(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)

    return call


def _forward(by_varlen: bool) -> Callable[..., Tensor]:
    """Returns a forward of torchtune's self-attention that does not copy keys to the heads that share them.

    torchtune copies each key and value to all query heads that share it; FlashAttention reads it in
    place, and ranks of a row need not exchange copies.
    """

    def forward(
        self: MultiHeadAttention,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: Any = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """Computes self-attention of x [b, s, embed_dim], which may be a part of a row."""
        row_mask, group = (mask.of_row, mask.group) if isinstance(mask, PartMask) else (mask, None)
        is_varlen = by_varlen and isinstance(row_mask, Documents)
        if group is None and not is_varlen:
            output: Tensor = MultiHeadAttention.forward(self, x, y, mask=mask, input_pos=input_pos)
            return output
        b, s, _ = x.shape
        # As in torchtune, up to the copies of keys. -1 heads, since tensor parallel ranks have a part of them.
        q, k, v = (
            projection(x).view(b, s, -1, self.head_dim) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.pos_embeddings is not None:
            q = self.pos_embeddings(q, input_pos=input_pos)
            k = self.pos_embeddings(k, input_pos=input_pos)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        # The whole row for a part of the heads, in place of a part of the row for all heads.
        if group is not None:
            q, k, v = heads_of_row(q, k, v, group)
        if is_varlen:
            attended = attend_by_varlen(q, k, v, row_mask)
        else:
            k, v = (tensor.repeat_interleave(q.size(1) // k.size(1), dim=1) for tensor in (k, v))
            by_head = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
            dropout_p = self.attn_dropout if self.training else 0.0
            attended = self._attention_call(*by_head, mask=row_mask, dropout_p=dropout_p, is_causal=False)
            attended = attended.squeeze(0).transpose(0, 1)
        if group is not None:
            attended = tokens_of_part(attended, group)
        projected: Tensor = self.output_proj(attended.reshape(b, s, -1))
        return projected

    return forward


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_by_varlen(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Computes [b * s, h, d] from q [b * s, h, d] and k, v [b * s, h or fewer, d].

    A query attends to the last ``window`` positions of its document, its own included; to all if
    None. Scores are multiplied by ``scale``, d**-0.5 if None.
    """
    # A local import, because it takes 0.3 seconds and is not needed on a CPU.
    from torch.nn.attention import varlen

    attend: Any = varlen.varlen_attn
    # Causal within each document; the kernel counts the positions before a query.
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if scale is not None:
        options["scale"] = scale
    if q.size(1) != k.size(1):
        if _shares_keys(attend):
            options["enable_gqa"] = True
        else:
            k, v = (tensor.repeat_interleave(q.size(1) // k.size(1), dim=1) for tensor in (k, v))
    bounds = (documents.cu_seqlens, documents.cu_seqlens, documents.max_seqlen, documents.max_seqlen)
    attended: Tensor = attend(q, k, v, *bounds, **options)
    return attended


@cache
def _shares_keys(varlen_attn: Callable[..., Any]) -> bool:
    return "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch >= 2.12


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _attend_by_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Applies flex attention to q, k, v [b, h, s, d]. Always compiled: uncompiled it stores all scores."""
    attended: Tensor = compile_flex_attention()(q, k, v, block_mask=mask)
    return attended


@cache
def compile_flex_attention(backend: Any = "inductor") -> Callable[..., Tensor]:
    """Returns compiled flex attention; it recompiles for each shape, and for training and validation."""
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False, backend=backend)
    return compiled


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_by_document(q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout_p: float) -> Tensor:
    """Applies attention to q, k, v [b, h, s, d], chain by chain; a plain document is one."""
    rows = []
    for row, *row_tensors in zip(documents, q.split(1), k.split(1), v.split(1), strict=True):
        if not all(isinstance(document, int) for document in row) and can_merge(q, v, dropout_p):
            rows.append(MergedAttention.apply(*row_tensors, row).transpose(1, 2))
            continue
        attended = [_attend(q, k, v, dropout_p) for q, k, v, _ in parts_of_chains(row, *row_tensors)]
        # Concatenated as [b, s, h, d], the layout that the caller needs next.
        rows.append(torch.cat([part.transpose(1, 2) for part in attended], dim=1))
    return torch.cat(rows).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    mask = None if q.size(2) == k.size(2) else mask_of_chain(q, k)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=mask is None)
