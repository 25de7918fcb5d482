"""Reads a Llama from a GGUF, the format of llama.cpp, into torchtune's own modules."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torchtune.models.llama2 import llama2
from torchtune.modules import TransformerDecoder

_OF_MODEL = {
    "token_embd.weight": "tok_embeddings.weight",
    "output_norm.weight": "norm.scale",
    "output.weight": "output.weight",
}
_OF_LAYER = {
    "attn_norm.weight": "sa_norm.scale",
    "attn_q.weight": "attn.q_proj.weight",
    "attn_k.weight": "attn.k_proj.weight",
    "attn_v.weight": "attn.v_proj.weight",
    "attn_output.weight": "attn.output_proj.weight",
    "ffn_norm.weight": "mlp_norm.scale",
    "ffn_gate.weight": "mlp.w1.weight",
    "ffn_down.weight": "mlp.w2.weight",
    "ffn_up.weight": "mlp.w3.weight",
}
_CONTROL_TOKEN = 3
"""llama.cpp's LLAMA_TOKEN_TYPE_CONTROL."""


def read_gguf(path: Path) -> tuple[TransformerDecoder, Tokenizer]:
    """The model in fp32, frozen, and its tokenizer.

    Raises:
        ModuleNotFoundError: the package ``gguf`` is missing.
        ValueError: the file holds another kind of model or tokenizer.
    """
    try:
        gguf, quants = import_module("gguf"), import_module("gguf.quants")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; read a GGUF with: pip install gguf") from error
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    known = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for name, value in known.items():
        if metadata.get(name) != value:
            raise ValueError(f"{path}: {name} is {metadata.get(name)}, only {value} can be read")
    weights = {
        _name_of(tensor.name): torch.tensor(quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in reader.tensors
    }
    return _model_of(metadata, weights), _tokenizer_of(metadata)


def _name_of(name: str) -> str:
    """A tensor's name in torchtune; its own if it has none, which loading will name."""
    if not name.startswith("blk."):
        return _OF_MODEL.get(name, name)
    _, layer, of_layer = name.split(".", 2)
    return f"layers.{layer}.{_OF_LAYER.get(of_layer, of_layer)}"


def _model_of(metadata: dict[str, Any], weights: dict[str, Tensor]) -> TransformerDecoder:
    model = llama2(
        vocab_size=len(weights["tok_embeddings.weight"]),
        num_layers=metadata["llama.block_count"],
        num_heads=metadata["llama.attention.head_count"],
        num_kv_heads=metadata["llama.attention.head_count_kv"],
        embed_dim=metadata["llama.embedding_length"],
        intermediate_dim=metadata["llama.feed_forward_length"],
        max_seq_len=metadata["llama.context_length"],
        norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_base=metadata["llama.rope.freq_base"],
    )
    weights.setdefault("output.weight", weights["tok_embeddings.weight"])
    # As they are: a GGUF of this architecture has the rows of q and k in the order of Meta's RoPE, which is
    # torchtune's. Those of Hugging Face would have to be permuted.
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def _tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    )
    return tokenizer
