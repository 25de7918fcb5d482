"""A model from its builder to loaded weights on the device, wrapped as asked for."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import parallelize_module
from torchtune import modules, training
from torchtune.modules.tied_linear import TiedLinear
from torchtune.training.activations import apply_selective_activation_checkpointing

from recipe_utils.data.plan import ATTENTION_SLOWNESS
from recipe_utils.parallel.ranks import gather_objects, shard_model


def build_on_meta(make_model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Calls ``make_model`` without allocating or initialising a weight."""
    with training.set_default_dtype(dtype), torch.device("meta"):
        return make_model()


def vocab_size_and_max_seq_len(model: nn.Module) -> tuple[int, int]:
    """What samples are checked against: number of token embeddings, longest sequence [tokens]."""
    decoder: Any = getattr(model, "decoder", model)
    # Llama 3.2 Vision embeds its special tokens with a second table.
    tables = [m for m in decoder.tok_embeddings.modules() if isinstance(m, nn.Embedding)]
    return sum(table.num_embeddings for table in tables), decoder.max_seq_len


def equal_attention_length(model: nn.Module) -> float:
    """Of :class:`recipe_utils.data.plan.MicrobatchCost` [tokens]: N / (L * d) over attention's slowness."""
    decoder: Any = getattr(model, "decoder", model)
    num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
    embed_dim = decoder.num_heads * decoder.head_dim
    return num_parameters / (len(decoder.layers) * embed_dim) / ATTENTION_SLOWNESS


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
        mesh: of :func:`recipe_utils.parallel.ranks.build_mesh`.
        tensor_parallel_plan: module name pattern -> style; used with more than one ``tp`` rank.
        enable_activation_checkpointing: recompute every self-attention layer in the backward.
        ac_mode: ``"full"`` or ``"selective"`` instead.
        ac_option: with ``"selective"``: recompute every this-many-th layer.
        compile_layers: compile each transformer layer with torch.compile.
        custom_sharded_layers: see :func:`recipe_utils.parallel.ranks.shard_model`.
        fsdp_cpu_offload: likewise.
        fsdp_reshard_after_forward: likewise.

    Raises:
        ValueError: token embeddings that the output layer shares would be sharded on their own, or
            split over ``tp`` ranks.
    """
    decoder: Any = getattr(model, "decoder", model)
    own_units = [layer.rsplit(".")[-1] for layer in custom_sharded_layers or ()]
    if isinstance(decoder.output, TiedLinear) and "tok_embeddings" in own_units:
        raise ValueError(
            f"custom_sharded_layers={list(custom_sharded_layers or ())}: this model's output layer "
            "shares the weight of tok_embeddings and could not read it; leave tok_embeddings out"
        )
    tp_degree = mesh["tp"].size()
    if isinstance(decoder.output, TiedLinear) and tp_degree > 1:
        raise ValueError(
            f"tensor_parallel_dim={tp_degree}: this model's output layer shares the weight of "
            "tok_embeddings, which torchtune's plans cannot split; set tensor_parallel_dim=1"
        )
    if compile_layers:
        training.compile_model(model, verbose=torch.distributed.get_rank() == 0)
    if tp_degree > 1:
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
    state_dict: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    cpu_offload: bool = False,
    names_elsewhere: Collection[str] = (),
) -> None:
    """Materialises a meta model on ``device`` with the weights of ``state_dict``.

    Each rank cuts its own shards out of the full weights; nothing is communicated.

    Args:
        model: after :func:`parallelize_model`.
        state_dict: full (unsharded) weights, on every rank.
        device: of the model.
        dtype: parameters are converted to it.
        cpu_offload: leave the parameters on the CPU, for FSDP2's CPU offload.
        names_elsewhere: weights that ``state_dict`` may have besides, because other pipeline stages do.

    Raises:
        ValueError: weights are missing, unexpected or of another shape, or a parameter does not
            divide over the ranks that shard it twice (tensor parallel and FSDP2).
        RuntimeError: the model has buffers that no checkpoint holds and ``rope_init`` does not make.
    """
    with training.set_default_dtype(dtype), device:
        for module in model.modules():
            if hasattr(module, "rope_init"):  # its cache is no part of the state dict
                module.rope_init()  # type: ignore[operator]

    expected = model.state_dict()
    missing = expected.keys() - state_dict.keys()
    unexpected = state_dict.keys() - expected.keys() - set(names_elsewhere)
    wrong_shape = [
        f"{name} {tuple(state_dict[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in expected.keys() & state_dict.keys()
        if state_dict[name].shape != expected[name].shape
    ]
    for problem, names in (
        ("lacks weights of the model", missing),
        ("has weights that the model has not", unexpected),
        ("has weights of another shape", wrong_shape),
    ):
        if names:
            raise ValueError(
                f"checkpointer: the checkpoint {problem}: {', '.join(sorted(names)[:5])}; model and "
                "checkpointer must be of one kind and size"
            )

    weights_device = torch.device("cpu") if cpu_offload else device
    model.load_state_dict(
        {
            name: _shard_like(parameter, name, state_dict[name], weights_device, dtype)
            for name, parameter in expected.items()
        },
        strict=True,
        assign=True,  # a meta tensor cannot be copied to
    )
    training.validate_no_params_on_meta_device(model)


def gather_weights(
    model: nn.Module,
    device: torch.device,
    keeps: bool,
    group: dist.ProcessGroup,
    names: Iterable[str],
) -> dict[str, Tensor]:
    """All weights, unsharded, on the CPU of rank 0; empty on the others. All ranks together.

    Args:
        model: after :func:`load_weights`, or an ``nn.ModuleDict`` of the pipeline stages on this rank.
        device: where sharded weights are put together.
        keeps: True on at least one rank of each pipeline stage and on rank 0: those that send.
        group: a CPU (gloo) group of all ranks.
        names: of the weights of the whole model, in the order that they are returned in.
    """
    weights: dict[str, Tensor] = {}
    for part in model.values() if isinstance(model, nn.ModuleDict) else [model]:
        for name, weight in part.state_dict().items():
            if isinstance(weight, DTensor):
                weight = cast(DTensor, weight.to(device)).full_tensor()
            if keeps:
                # FSDP2 puts shards together with padding, which torch.save would write, too.
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
    return {name: weights[name] for name in names}


def _shard_like(
    like: Tensor, name: str, full: Tensor, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """This rank's part of ``full`` [same shape as ``like``], sharded as ``like`` is."""
    if not isinstance(like, DTensor):
        return full.to(device, dtype, copy=True)
    # Not distribute_tensor: it cannot place what tensor parallelism and FSDP2 shard together.
    shape, offset = compute_local_shape_and_global_offset(
        full.shape, like.device_mesh, like.placements
    )
    if tuple(shape) != tuple(like.to_local().shape):
        raise ValueError(
            f"tensor_parallel_dim: {name} {tuple(full.shape)} does not divide over the mesh "
            f"{tuple(like.device_mesh.shape)}; set smaller dimensions"
        )
    slices = tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))
    local = full[slices].to(device, dtype, copy=True)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
