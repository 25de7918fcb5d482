"""Casts, compiles, splits, recomputes and shards a model or pipeline stage on the meta device, in place."""

import os
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor.parallel import parallelize_module
from torchtune import modules, training
from torchtune.modules.tied_linear import TiedLinear
from torchtune.training.activations import apply_selective_activation_checkpointing

from recipe_utils.compiler import configure_compiler
from recipe_utils.model_kinds import text_decoder
from recipe_utils.models.adapters.lora import find_adapters
from recipe_utils.models.adapters.nf4 import check_nf4
from recipe_utils.models.kernels import fuse_norms_and_rope
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.transformers.interface import DecoderOfTransformers
from recipe_utils.optim.optimizer import trained_parameters
from recipe_utils.parallel.fsdp import shard_model
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.torchtune_names import instantiate


def parallelize(model: nn.Module, settings: ModelSettings, ranks: Ranks) -> None:
    """Applies precision, compile, tensor parallelism, activation checkpointing and FSDP2 to a meta model, in place.

    ``model`` may be a pipeline stage. Raises ValueError if it cannot be split or sharded as configured.
    """
    # Refusals come first, while the modules still are what the config describes.
    names = [layer.rsplit(".")[-1] for layer in settings.custom_sharded_layers or ()]
    if isinstance(text_decoder(model).output, TiedLinear) and "tok_embeddings" in names:
        raise ValueError(
            f"custom_sharded_layers={settings.custom_sharded_layers}: this model's output layer "
            "shares the weight of tok_embeddings and could not read it; leave tok_embeddings out"
        )
    check_tensor_parallel(model, ranks)
    check_nf4(model, find_adapters(model).frozen, ranks.dims.dp_shard if is_sharded(settings, ranks) else None)
    # FSDP2 casts trained weights back for each forward. Once sharded, they could not change their precision.
    for parameter in model.parameters():
        if parameter.requires_grad and settings.torch_weights_dtype != settings.torch_dtype:
            parameter.data = parameter.data.to(settings.torch_weights_dtype)
    # Layers are compiled before they are wrapped: wrappers break the graph.
    apply_compile(model, settings)
    # Tensor parallelism needs plain parameters and the names of the plan, without wrappers.
    if ranks.dims.tp > 1:
        training.prepare_mha_for_tp(model, ranks.mesh["tp"])
        plan = dict(instantiate(OmegaConf.create(settings.tensor_parallel_plan)))
        parallelize_module(model, ranks.mesh["tp"], parallelize_plan=plan)
    # The recomputation is inside of FSDP2's units, so that it finds gathered weights.
    apply_activation_checkpointing(model, settings)
    apply_fsdp(model, settings, ranks)


def small_model(meta_model: nn.Module, settings: ModelSettings, ranks: Ranks) -> nn.Module:
    """Returns the trained parameters of a model by name, of two elements in most dimensions, sharded as it will be.

    An optimizer is tried on them before weights are read.
    """
    small = nn.Module()
    for name, p in trained_parameters(meta_model).items():
        *path, last = name.split(".")
        module: Any = small
        for part in path:
            module = module._modules.setdefault(part, nn.Module())
        shape = [2 * ranks.dims.dp_shard, *[2] * p.dim()][: p.dim()]
        zeros = torch.zeros(shape, dtype=settings.torch_weights_dtype, device=ranks.device)
        module.register_parameter(last, nn.Parameter(zeros))
    apply_fsdp(small, settings, ranks)
    return small


def is_sharded(settings: ModelSettings, ranks: Ranks) -> bool:
    """Returns True if FSDP2 shards or offloads all parameters."""
    return ranks.dp_degree > 1 or settings.offloads_to_cpu(ranks.device)


def check_tensor_parallel(model: nn.Module, ranks: Ranks) -> None:
    """Raises ValueError if ranks split layers of a model that no plan of torchtune can split."""
    if ranks.dims.tp == 1:
        return
    reason = ""
    if isinstance(model, DecoderOfTransformers):
        reason = f"{type(model.model).__name__} of transformers cannot be split"
    elif isinstance(text_decoder(model).output, TiedLinear):
        reason = "torchtune's plans cannot split the weight that output layer and tok_embeddings share"
    elif find_adapters(model).modules:
        reason = "torchtune's plans cannot split LoRA's layers"
    if reason:
        raise ValueError(f"tensor_parallel_dim={ranks.dims.tp}: {reason}; set tensor_parallel_dim=1")


def apply_compile(model: nn.Module, settings: ModelSettings) -> None:
    """Compiles each layer; without ``compile``, replaces norms and RoPE by faster ones."""
    if not settings.compile:
        fuse_norms_and_rope(model)
        return
    configure_compiler()
    if isinstance(model, DecoderOfTransformers):
        layers = model.layers
    else:
        kinds = (modules.TransformerSelfAttentionLayer, modules.TransformerCrossAttentionLayer)
        layers = [module for module in text_decoder(model).modules() if isinstance(module, kinds)]
    # Dynamic from the start: by default, a second length of rows would be compiled in the middle of a training.
    for layer in layers:
        layer.compile(backend=os.environ.get("TORCH_COMPILE_BACKEND", "inductor"), dynamic=True)


def apply_activation_checkpointing(model: nn.Module, settings: ModelSettings) -> None:
    """Makes layers recompute their activations in the backward, as configured."""
    if not settings.enable_activation_checkpointing and settings.ac_mode is None:
        return
    if isinstance(model, DecoderOfTransformers):
        model.recompute_layers(settings.ac_option or 1)
    elif settings.ac_mode is None:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    else:
        apply_selective_activation_checkpointing(model, settings.ac_mode, settings.ac_option)
        for module in model.modules():
            if isinstance(module, CheckpointWrapper):  # torchtune's would draw other masks of dropout
                module.checkpoint_fn.keywords["preserve_rng_state"] = True


def apply_fsdp(model: nn.Module, settings: ModelSettings, ranks: Ranks) -> None:
    """Shards parameters over data-parallel ranks, and computes in ``dtype`` if weights have another."""
    trained = any(p.requires_grad for p in model.parameters())
    is_cast = settings.torch_weights_dtype != settings.torch_dtype and trained
    shards = is_sharded(settings, ranks)
    if not shards and not is_cast:
        return
    # On a single rank FSDP2 would copy frozen weights at each all-gather, so they stay outside of it.
    frozen = [] if shards else [p for p in model.parameters() if not p.requires_grad]
    reshards: Any = settings.fsdp_reshard_after_forward
    shard_model(
        model,
        ranks.mesh,
        custom_sharded_layers=settings.custom_sharded_layers,
        cpu_offload=settings.offloads_to_cpu(ranks.device),
        # A stage soon needs its weights for the next microbatch.
        reshard_after_forward=ranks.dims.pp == 1 if reshards is None else reshards,
        compute_dtype=settings.torch_dtype if is_cast else None,
        ignored=frozen,
        of_root=model.of_images() if isinstance(model, DecoderOfTransformers) and model.check.joins else (),
    )
