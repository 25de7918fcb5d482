"""Attention within documents: a token of a packed row attends to preceding tokens of its own document.

In a document that is a tree, it attends to its segment and to that one's ancestors. The model is called with
``document_lengths=Documents([[5, 3, 9, 2]])`` beside the row's 19 tokens. A hook turns them into the ``mask`` that
torchtune's layers pass on: a dense one for another attention than torchtune's, else :class:`.PackedRows`, with which
the replaced forward of each self-attention calls :func:`.attend`.

Shapes: b rows, s positions per row.
"""

from types import MappingProxyType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torchtune.modules import MultiHeadAttention

from recipe_utils.compiler import configure_compiler
from recipe_utils.model_kinds import text_decoder
from recipe_utils.models.attention.attend import PackedRows, attend
from recipe_utils.models.attention.block_mask import block_mask, dense_mask
from recipe_utils.models.attention.exchange import RowGroups
from recipe_utils.models.attention.packed_attention import self_attentions
from recipe_utils.models.transformers.interface import DecoderOfTransformers
from recipe_utils.text.limits import PackedAttention


def attend_within_documents(
    model: nn.Module, attention: PackedAttention, max_row_length: int, row_groups: RowGroups = MappingProxyType({})
) -> None:
    """Makes ``model(..., document_lengths=documents)`` attend within documents only, without device synchronizations.

    The kernel of ``attention`` is logged at the first packed row. The forward raises ConfigError if rows are
    packed and this machine or model does not support it.

    ``model`` is not wrapped yet. torchtune's decoders reject rows above their ``max_seq_len``, which is raised
    to ``max_row_length`` [tokens]; positions restart with each document, so only documents must stay
    below the original. ``row_groups`` are those of rows that span ranks.
    """
    if attention.kernel != "dense" and not isinstance(model, DecoderOfTransformers):
        for module in self_attentions(model):
            module.forward = MethodType(_forward, module)
    if "flex" in (attention.kernel, attention.kernel_of_trees):
        configure_compiler()

    if isinstance(model, DecoderOfTransformers):
        model.attend_within_documents(attention, max_row_length, row_groups)
        return  # its forward takes documents
    decoder = text_decoder(model)
    _longest_documents[decoder] = decoder.max_seq_len
    decoder.max_seq_len = max(decoder.max_seq_len, max_row_length)

    def documents_to_mask(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "document_lengths" in kwargs:
            documents = kwargs.pop("document_lengths")
            kernel = attention.kernel_of(documents)
            if kernel == "dense":
                kwargs["mask"] = dense_mask(documents)
            else:
                exchange = row_groups[documents.num_ranks] if documents.num_ranks > 1 else None
                mask = block_mask(documents) if kernel == "flex" else None
                kwargs["mask"] = PackedRows(documents, kernel, exchange, mask)
        return args, kwargs

    model.register_forward_pre_hook(documents_to_mask, with_kwargs=True)


_longest_documents = WeakKeyDictionary[nn.Module, int]()


def longest_document(model: nn.Module) -> int:
    """Returns the length at which a model's positions end [tokens]; packed rows may be longer."""
    decoder = text_decoder(model)
    return _longest_documents.get(decoder, decoder.max_seq_len)


def _forward(
    self: MultiHeadAttention, x: Tensor, y: Tensor | None = None, *, mask: Any = None, input_pos: Tensor | None = None
) -> Tensor:
    """Computes torchtune's self-attention of x [b, s, embed_dim]; of :class:`.PackedRows`, within documents.

    torchtune copies each key and value to all query heads that share it; FlashAttention reads it in
    place, and ranks of a row need not exchange copies.
    """
    if not isinstance(mask, PackedRows):
        output: Tensor = MultiHeadAttention.forward(self, x, y, mask=mask, input_pos=input_pos)
        return output
    b, s, _ = x.shape
    # As in torchtune, up to the copies of keys. -1 heads, since tensor parallel ranks have a part of them.
    q, k, v = (projection(x).view(b, s, -1, self.head_dim) for projection in (self.q_proj, self.k_proj, self.v_proj))
    if self.pos_embeddings is not None:
        q = self.pos_embeddings(q, input_pos=input_pos)
        k = self.pos_embeddings(k, input_pos=input_pos)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if self.q_norm is not None:
        q = self.q_norm(q)
    if self.k_norm is not None:
        k = self.k_norm(k)
    attended = attend(q, k, v, mask, dropout_p=self.attn_dropout if self.training else 0.0)
    projected: Tensor = self.output_proj(attended.reshape(b, s, -1))
    return projected
