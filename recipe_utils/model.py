"""A model from its builder to loaded weights on the device, wrapped as asked for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torchtune import modules, training
from torchtune.modules.tied_linear import TiedLinear
from torchtune.training.activations import apply_selective_activation_checkpointing

from recipe_utils.parallelism import shard_model


def build_on_meta(make_model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Calls ``make_model`` without allocating or initialising a weight."""
    with training.set_default_dtype(dtype), torch.device("meta"):
        return make_model()


def vocab_size_and_max_seq_len(model: nn.Module) -> tuple[int, int]:
    """What samples are checked against: number of token embeddings, longest sequence [tokens]."""
    decoder: Any = getattr(model, "decoder", model)
    embeddings = decoder.tok_embeddings
    # Models with special-token embeddings of their own (Llama 3.2 Vision) accept both kinds.
    num_fusion_tokens = getattr(embeddings, "fusion_embedding", None)
    extra = 0 if num_fusion_tokens is None else num_fusion_tokens.num_embeddings
    return embeddings.weight.shape[0] + extra, decoder.max_seq_len


def parallelize_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    tensor_parallel_plan: Mapping[str, Any] | None = None,
    enable_activation_checkpointing: bool = False,
    ac_mode: str | None = None,
    ac_option: int | str | None = None,
    compile_layers: bool = False,
    custom_sharded_layers: Sequence[str] | None = None,
    fsdp_cpu_offload: bool = False,
    fsdp_reshard_after_forward: bool = True,
) -> nn.Module:
    """Applies compile, tensor parallelism, activation checkpointing and FSDP2, in that order.

    Args:
        model: on the meta device.
        mesh: of :func:`recipe_utils.parallelism.build_mesh`.
        tensor_parallel_plan: module name pattern -> style; used with more than one ``tp`` rank.
        enable_activation_checkpointing: recompute every self-attention layer in the backward.
        ac_mode: ``"full"`` or ``"selective"`` instead.
        ac_option: with ``"selective"``: recompute every this-many-th layer.
        compile_layers: compile each transformer layer with torch.compile.
        custom_sharded_layers: see :func:`recipe_utils.parallelism.shard_model`.
        fsdp_cpu_offload: likewise.
        fsdp_reshard_after_forward: likewise.

    Raises:
        ValueError: token embeddings that the output layer shares would be sharded on their own.
    """
    decoder: Any = getattr(model, "decoder", model)
    own_units = [layer.rsplit(".")[-1] for layer in custom_sharded_layers or ()]
    if isinstance(decoder.output, TiedLinear) and "tok_embeddings" in own_units:
        raise ValueError(
            f"custom_sharded_layers={list(custom_sharded_layers or ())}: this model's output layer "
            "shares the weight of tok_embeddings and could not read it; leave tok_embeddings out"
        )
    if compile_layers:
        training.compile_model(model, verbose=torch.distributed.get_rank() == 0)
    if mesh["tp"].size() > 1:
        model = training.prepare_mha_for_tp(model, mesh["tp"])
        parallelize_module(model, mesh["tp"], parallelize_plan=dict(tensor_parallel_plan or {}))
    if enable_activation_checkpointing:
        training.set_activation_checkpointing(
            model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
        )
    elif ac_mode is not None:
        apply_selective_activation_checkpointing(model, ac_mode, ac_option)
    if mesh["dp_replicate"].size() * mesh["dp_shard"].size() > 1 or fsdp_cpu_offload:
        shard_model(
            model,
            mesh,
            custom_sharded_layers=custom_sharded_layers,
            cpu_offload=fsdp_cpu_offload,
            reshard_after_forward=fsdp_reshard_after_forward,
        )
    return model


def load_weights(
    model: nn.Module,
    state_dict: dict[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    cpu_offload: bool = False,
) -> None:
    """Materialises a meta model on ``device`` with the weights of ``state_dict``.

    Args:
        model: after :func:`parallelize_model`.
        state_dict: full (unsharded) weights, on every rank.
        device: of the model.
        dtype: parameters are converted to it.
        cpu_offload: leave the parameters on the CPU, for FSDP2's CPU offload.

    Raises:
        RuntimeError: weights are missing, unexpected, or of another shape.
    """
    with training.set_default_dtype(dtype), device:
        for module in model.modules():
            if hasattr(module, "rope_init"):  # its cache is no part of the state dict
                module.rope_init()  # type: ignore[operator]
    unexpected = sorted(set(state_dict) - set(model.state_dict()))
    if unexpected:
        raise RuntimeError(
            f"checkpointer: the checkpoint has weights that the model has not: {unexpected[:5]}; "
            "set model and checkpointer.model_type to the model of the checkpoint"
        )
    training.load_from_full_model_state_dict(
        model, state_dict, device, strict=True, cpu_offload=cpu_offload
    )
    training.validate_no_params_on_meta_device(model)
