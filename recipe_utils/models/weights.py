"""Loads a checkpoint's weights into a model's shards, and gathers them from all ranks."""

import json
import logging
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune import training
from torchtune.modules import TransformerSelfAttentionLayer

from recipe_utils.checkpoint.peft import load_checkpoint
from recipe_utils.checkpoint.tensors import describe_mismatch, parameters_by_name
from recipe_utils.models.adapters.adapted_linear import forget_norms
from recipe_utils.models.adapters.lora import check_origin, find_adapters, fingerprint_of_frozen, initial_adapters
from recipe_utils.models.pipeline.stages import Stages, adapters_of, local_stages
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.transformers.interface import DecoderOfTransformers, modules_for_images
from recipe_utils.parallel.fsdp import local
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import naming
from recipe_utils.torchtune_names import ADAPTER_CONFIG, ADAPTER_KEY, MODEL_KEY, log_rank_zero, set_default_dtype


def load_model(
    model: nn.Module, checkpointer: Any, cfg: Mapping[str, Any], settings: ModelSettings, ranks: Ranks, seed: int
) -> dict[str, str]:
    """Loads a model's weights with a checkpointer; see :func:`load_weights`.

    ``cfg`` is the checkpointer's. Raises ConfigError if the weights cannot be read or do not fit the model.
    """
    with naming("checkpointer"):
        checkpoint = load_checkpoint(checkpointer, cfg, images=bool(modules_for_images(model)))
        folder = getattr(checkpointer, "_checkpoint_dir", None)
        fingerprints = fingerprint_of_config(model, folder)
        fingerprints = load_weights(model, checkpoint, settings, ranks.device, seed) | fingerprints
    for text in differences_from_config(model, folder):
        log_rank_zero(text, logging.WARNING)
    return fingerprints


def fingerprint_of_config(model: nn.Module, folder: str | Path | None) -> dict[str, str]:
    """Returns a fingerprint of the ``config.json`` of a model of transformers; empty for another model.

    Raises ValueError if that in the ``folder`` of its weights describes another model.
    """
    stage = local_stages(model)[0]
    return {"config.json": stage.fingerprint(folder)} if isinstance(stage, DecoderOfTransformers) else {}


def differences_from_config(model: nn.Module, folder: str | Path | None) -> Iterator[str]:
    """Yields differences between the model and the ``config.json`` that exports copy."""
    if folder is None:
        return
    try:
        described = json.loads(Path(folder, "config.json").read_text())
    except (OSError, ValueError):
        return
    described = described | (described.get("rope_parameters") or {})
    for module in model.modules():
        if isinstance(module, TransformerSelfAttentionLayer):
            theta, eps = getattr(module.attn.pos_embeddings, "base", None), getattr(module.sa_norm, "eps", None)
            for name, value in (("rope_theta", theta), ("rms_norm_eps", eps)):
                if value is not None and value != described.get(name, value):
                    yield (
                        f"model: {name} is {value:g}, and {described[name]:g} in {folder}/config.json, which "
                        "exports keep: others will compute other logits"
                    )
            return


def load_weights(
    model: nn.Module, checkpoint: dict[str, Any], settings: ModelSettings, device: torch.device, seed: int = 0
) -> dict[str, str]:
    """Materializes a meta model on ``device`` with a checkpoint's weights and, if it has adapters, theirs.

    Each rank slices its own shards from the full weights, without communication. Parameters are converted to the
    precision that they were built in, and stay on the CPU for FSDP2's offload; buffers do not.

    ``checkpoint`` contains full weights and, optionally, adapters, on every rank, by torchtune's
    keys; both are removed from it. ``seed`` is that of fresh adapters.

    Returns fingerprints of the frozen weights; a resumed training must have the same ones.

    Raises:
        ValueError: weights do not match the model, adapters were trained with another alpha or base,
            or weights do not divide over the ranks that shard them twice (tensor parallel and FSDP2).
        RuntimeError: the model has buffers that neither the checkpoint nor ``rope_init`` provides.
    """
    base = checkpoint.pop(MODEL_KEY)
    given = checkpoint.pop(ADAPTER_KEY, None)
    described = checkpoint.pop(ADAPTER_CONFIG, {})
    # Fingerprints are those of the file's weights, before they are sharded or quantized.
    adapters = adapters_of(model)
    fingerprints = fingerprint_of_frozen(adapters, base)
    check_origin(adapters, fingerprints, described)
    weights = {**base, **initial_adapters(adapters, base, given, seed, settings.torch_dtype)}
    # A stage takes its own weights of all that the file has.
    names = model.names_of_weights if isinstance(model, Stages) else ()
    for stage in local_stages(model):
        materialize(stage, weights, settings, device, names)
    return fingerprints


def materialize(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    settings: ModelSettings,
    device: torch.device,
    names_of_other_stages: Collection[str] = (),
) -> None:
    """Moves a meta model or stage to ``device`` with this rank's parts of full ``weights``, also those of adapters."""
    with set_default_dtype(settings.torch_dtype), device:
        for module in model.modules():
            if hasattr(module, "rope_init"):  # its cache is not in the state dict
                module.rope_init()  # type: ignore[operator]

    check_weights(model, weights, names_of_other_stages)
    scaler_block_sizes = find_adapters(model).frozen
    # FSDP2's CPU offload moves parameters to the device, buffers stay where they are.
    parameter_device = torch.device("cpu") if settings.offloads_to_cpu(device) else device
    shards = {
        name: _shard_like(
            like.detach(),
            name,
            weights[name],
            parameter_device if isinstance(like, nn.Parameter) else device,
            scaler_block_sizes.get(name, 0),
        )
        for name, like in model.state_dict(keep_vars=True).items()
    }
    model.load_state_dict(shards, assign=True)  # meta tensors cannot be copied to
    training.validate_no_params_on_meta_device(model)


def check_weights(
    model: nn.Module, state_dict: Mapping[str, Tensor], names_of_other_stages: Collection[str] = ()
) -> None:
    """Raises ValueError if full weights, by torchtune's keys, are missing, unexpected or of another shape.

    The model or stage may be sharded and on the meta device. ``names_of_other_stages`` may be in
    ``state_dict`` in addition.
    """
    if problem := describe_mismatch(state_dict, model.state_dict(), names_of_other_stages, compares_dtypes=False):
        raise ValueError(
            f"the checkpoint does not fit the model: {problem}; model and checkpointer must be of one "
            "architecture and size"
        )


def crc32_of_weights(weights: Mapping[str, Tensor], group: dist.ProcessGroup) -> str:
    """Returns a checksum of every byte of full CPU weights, the same on every rank. All ranks together.

    Each rank reads its share of the weights; ``group`` is a CPU (gloo) group of all ranks.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    share = {}
    for name in sorted(weights)[rank::world_size]:
        weight = weights[name].detach().contiguous()
        data: Any = weight.reshape(-1).view(torch.uint8).numpy()
        share[name] = f"{tuple(weight.shape)} {weight.dtype} {zlib.crc32(data):08x}"
    lines = sorted(item for share_of_rank in gather_objects(share, group) for item in share_of_rank.items())
    return f"{zlib.crc32(repr(lines).encode()):08x}"


@contextmanager
def with_weights(model: nn.Module, others: Mapping[str, Tensor]) -> Iterator[None]:
    """Gives trained parameters the values ``others`` in the block, and their own again after it, bitwise.

    ``others`` has names of :func:`recipe_utils.checkpoint.tensors.parameters_by_name`, and is sharded as they are.
    A copy of the shards is allocated. Nothing in the block may train.
    """

    @torch.no_grad()
    def copy(values: Mapping[str, Tensor]) -> None:
        # What was gathered or computed from the values before must not be used again.
        parameters = parameters_by_name(model)
        for name, value in values.items():
            local(parameters[name]).copy_(local(value))
        forget_norms(model)

    trained = {name: local(p.detach()).clone() for name, p in parameters_by_name(model).items() if name in others}
    copy(others)
    try:
        yield
    finally:
        copy(trained)


def gather_weights(
    model: nn.Module, device: torch.device, keeps: bool, group: dist.ProcessGroup, only: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Returns all weights, unsharded, on the CPU of rank 0 in the whole model's order; empty on other ranks.

    All ranks together. ``keeps`` is True for the ranks that send: at least one per pipeline stage,
    and rank 0. ``group`` is a CPU (gloo) group of all ranks; ``only`` names the weights to gather.
    """
    weights: dict[str, Tensor] = {}
    for stage in local_stages(model):
        for name, weight in stage.state_dict().items():
            if only is not None and name not in only:
                continue
            weight = _plain(weight, device)
            if keeps:
                # FSDP2 gathers shards with padding, which torch.save would write, too.
                padded = weight.untyped_storage().nbytes() > weight.nbytes
                weights[name] = (weight.clone() if padded else weight).cpu()
    descriptions = gather_objects({n: (w.shape, w.dtype) for n, w in weights.items()}, group)
    if dist.get_rank(group) != 0:
        for name, weight in weights.items():
            if name not in descriptions[0]:
                dist.send(weight.contiguous(), dst=0, group=group)
        return {}
    for rank, description in enumerate(descriptions[1:], start=1):
        for name, (shape, dtype) in description.items():
            if name not in descriptions[0]:
                weights[name] = torch.empty(shape, dtype=dtype)
                dist.recv(weights[name], src=rank, group=group)
    order = model.names_of_weights if isinstance(model, Stages) else list(weights)
    return {name: weights[name] for name in order if name in weights}


def _shard_like(like: Tensor, name: str, full: Tensor, device: torch.device, scaler_block_size: int) -> Tensor:
    """Returns this rank's part of ``full`` [shape of ``like``], with the sharding and precision of ``like``.

    With a ``scaler_block_size`` above 0 it is in NF4.
    """
    dtype = like.dtype
    if not isinstance(like, DTensor):
        plain = full.to(device, dtype, copy=True)
        return to_nf4(plain, scaler_block_size=scaler_block_size) if scaler_block_size else plain
    # distribute_tensor does not support tensors sharded by both tensor parallelism and FSDP2.
    shape, offset = compute_local_shape_and_global_offset(full.shape, like.device_mesh, like.placements)
    if tuple(shape) != tuple(like.to_local().shape):
        raise ValueError(
            f"tensor_parallel_dim: {name} {tuple(full.shape)} does not divide over the mesh "
            f"{tuple(like.device_mesh.shape)}; set smaller dimensions"
        )
    if scaler_block_size:
        # Quantized whole, since blocks share a mean; then cut at block borders, see check_nf4.
        quantized = to_nf4(full.to(device, dtype), scaler_block_size=scaler_block_size)
        part = quantized.split(shape[0])[offset[0] // shape[0]]
        shard = part.new_zeros(part.shape)
        shard.copy_(part)
    else:
        slices = tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))
        shard = full[slices].to(device, dtype, copy=True)
    if shard.device.type != like.device_mesh.device_type:
        # fsdp_cpu_offload: DTensor.from_local would move it to the mesh's device, where FSDP2 rejects it.
        assert like._spec.tensor_meta is not None
        meta = like._spec.tensor_meta._replace(dtype=shard.dtype)
        return DTensor(shard, replace(like._spec, tensor_meta=meta), requires_grad=False)
    layout: dict[str, Any] = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return DTensor.from_local(shard, like.device_mesh, like.placements, **layout)


def _plain(weight: Tensor, device: torch.device) -> Tensor:
    """Returns a weight unsharded and dequantized."""
    shard = local(weight)
    if isinstance(shard, NF4Tensor):
        shard = shard.get_original_weight()
    if not isinstance(weight, DTensor):
        return shard
    layout: dict[str, Any] = {"shape": weight.shape, "stride": weight.stride(), "run_check": False}
    return DTensor.from_local(shard.to(device), weight.device_mesh, weight.placements, **layout).full_tensor()
