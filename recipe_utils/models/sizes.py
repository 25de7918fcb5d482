"""Properties of a model that data depends on."""

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recipe_utils.model_kinds import text_decoder
from recipe_utils.models.attention.packed_attention import attention_of
from recipe_utils.models.transformers.interface import DecoderOfTransformers
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.plans.cost import cost_on
from recipe_utils.text.limits import Kernel, ModelLimits
from recipe_utils.torchtune_names import logger

_ROW_MULTIPLE = 128
"""Multiple that rows on CUDA are padded to [positions]: matrix product tiles, and blocks of flex
attention. Not measured."""


_CHOSEN_EXPERTS = "num_experts_per_tok", "moe_topk", "top_k_experts"
"""Keys of configs of transformers with the number of experts that compute a token."""


def limits_of(
    model: nn.Module,
    device: torch.device,
    tensor_parallel_dim: int = 1,
    packed_attention: Kernel | None = None,
    teacher: nn.Module | None = None,
) -> ModelLimits:
    """Returns the limits of samples and rows of a whole model, on any device, and the cost of a microbatch.

    With a ``teacher``, samples and rows are within the limits of both models. Packed rows are computed by
    ``packed_attention``, see :func:`.attention_of`.
    """
    # The trained model's, in which tensor-parallel ranks have a part of the heads.
    vocab_size, max_seq_len = vocab_size_and_max_seq_len(model)
    attentions = [attention_of(model, device, packed_attention, tensor_parallel_dim)]
    limits_length = "the model's"
    # A teacher computes the same rows, so each limit is that of the smaller model.
    if teacher is not None:
        attention = attention_of(teacher, device, packed_attention)
        num_heads = tuple((f"teacher_{key}", number) for key, number in attention.num_heads)
        attentions.append(replace(attention, num_heads=num_heads))
        teacher_vocab_size, teacher_length = vocab_size_and_max_seq_len(teacher)
        vocab_size = min(vocab_size, teacher_vocab_size)
        if teacher_length < max_seq_len:
            max_seq_len, limits_length = teacher_length, "the teacher_model's"
    return ModelLimits(
        vocab_size,
        max_seq_len,
        cost_on(device.type, equal_attention_length(model)),
        tuple(attentions),
        row_multiple=_ROW_MULTIPLE if device.type == "cuda" else None,
        limits_length=limits_length,
        **_of_images(model),
    )


def _of_images(model: nn.Module) -> dict[str, Any]:
    """Returns how a model takes images, and the work of its tower for one number of them, in that for a token of text.

    A tower computes each patch with all of its weights, as layers of text do each token, of experts with those that are
    chosen for it; without gradients it computes the forward alone, a third. Attention between patches is left out.
    """
    decoder = text_decoder(model)
    if not isinstance(decoder, DecoderOfTransformers) or not decoder.check.joins:
        return {}
    of_images = decoder.of_images()
    ids = {id(parameter) for parameter in of_images}
    text = decoder.model.config.get_text_config()
    num_chosen = next((number for name in _CHOSEN_EXPERTS if (number := getattr(text, name, None))), None)
    num_of_text = 0.0
    for layer in decoder.layers:
        for name, parameter in layer.named_parameters():
            are_experts = "experts" in name.split(".") and parameter.dim() == 3  # [e, m, n]
            num_of_text += parameter.numel() * (num_chosen / len(parameter) if are_experts and num_chosen else 1)
    num_of_images = sum(p.numel() * (1 if p.requires_grad else 1 / 3) for p in of_images)
    # The first matrix of a tower maps the numbers of a patch to its width.
    patch = next(p[0].numel() for m in decoder.modules() for p in m.parameters(False) if id(p) in ids and p.dim() > 1)
    return {"joins": decoder.check.joins, "tokens_per_pixel": num_of_images / num_of_text / patch}


def vocab_size_and_max_seq_len(model: nn.Module) -> tuple[int, int]:
    """Returns the limits of samples: number of token embeddings, longest sequence [tokens]."""
    decoder = text_decoder(model)
    # Llama 3.2 Vision has a second table for its special tokens.
    tables = [m for m in decoder.tok_embeddings.modules() if isinstance(m, nn.Embedding)]
    return sum(table.num_embeddings for table in tables), decoder.max_seq_len


def num_outputs(model: nn.Module) -> int:
    """Returns the number of rows of the output layer."""
    output = text_decoder(model).output
    weight: Tensor = getattr(output, "tied_module", output).weight
    return weight.size(0)


def warn_if_above_memory(trained: nn.Module, frozen: nn.Module, ranks: Ranks) -> None:
    """Warns if the training state of one model and the weights of another exceed the memory of ``ranks``.

    Both models are whole, on any device; ``trained`` is in its training precision.
    """
    sizes = [sum(p.nbytes for p in model.parameters()) for model in (trained, frozen)]
    sizes[0] += 3 * sum(p.nbytes for p in trained.parameters() if p.requires_grad)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if ranks.device.type == "cuda":
        memory = torch.cuda.get_device_properties(ranks.device).total_memory
    num_shards = ranks.dims.dp_shard * ranks.dims.pp
    student, teacher, here = (size / 2**30 for size in (*sizes, memory))
    if (student + teacher) / num_shards > here:
        logger.warning(
            f"student {student:.1f} GiB (weights, gradients, Adam's state) and teacher {teacher:.1f} GiB over "
            f"{num_shards} ranks are above the {here:.1f} GiB of each; start more ranks, or set "
            "teacher_fsdp_cpu_offload=True"
        )


def equal_attention_length(model: nn.Module) -> float:
    """Returns ``MicrobatchCost.equal_attention_length`` [tokens] for attention at full speed: N / (L * d)."""
    decoder = text_decoder(model)
    num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
    embed_dim = decoder.num_heads * decoder.head_dim
    return num_parameters / (len(decoder.layers) * embed_dim)
