"""Builds a model's modules on the meta device, and cuts, wraps and shards them."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor.parallel import parallelize_module
from torchtune import config, modules, training
from torchtune.modules.tied_linear import TiedLinear
from torchtune.training.activations import apply_selective_activation_checkpointing
from torchtune.utils import get_logger

from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.compiler import configure_compiler
from recipe_utils.models.adapters.lora import adapters_in_words, find_adapters, freeze_base
from recipe_utils.models.adapters.nf4 import check_nf4, drop_upcast_hooks, without_quantizing
from recipe_utils.models.adapters.qat import simulate_quantization
from recipe_utils.models.attention.packed_attention import missing_for_triton
from recipe_utils.models.kernels import fuse_norms_and_rope
from recipe_utils.models.pipeline.schedule import PipelineSettings, stages_of_rank
from recipe_utils.models.pipeline.stages import Stages, WholeModel, cut_to_stage, layers_of_stages, ties_output
from recipe_utils.parallel.fsdp import shard_model
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks, resolve_device
from recipe_utils.settings.components import Component
from recipe_utils.settings.keys import STRICT, Count, OnlyWith
from recipe_utils.settings.problems import Problem

_log = get_logger("INFO")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, config=STRICT)
class ModelSettings(PipelineSettings):
    """Precision, memory savings and kernels of a model."""

    dtype: Literal["fp32", "bf16", "fp64"] | None = None
    """Precision of forward and backward; null is fp32. fp16 is not supported."""
    weights_dtype: Literal["fp32", "bf16", "fp64"] | None = None
    """Precision of trained weights, their summed gradients and optimizer state; null is ``dtype``."""
    compile: bool = False
    """Compiles each transformer layer, and the loss."""
    packed_attention: Annotated[
        Literal["varlen", "flex", "by_document"] | None,
        OnlyWith("microbatching", ("packed",)),
        OnlyWith("dataset", argument="packed"),
    ] = None
    """Attention of packed rows: FlashAttention, compiled flex attention, or one sample after the other;
    null selects by device and dtype."""
    enable_activation_checkpointing: bool = False
    """Recomputes every layer in the backward."""
    enable_activation_offloading: bool = False
    """Keeps activations on the CPU; needs CUDA and activation checkpointing."""
    ac_mode: Literal["full", "selective"] | None = None
    """Recomputes all layers (``full``) or some (``selective``); replaces
    ``enable_activation_checkpointing``."""
    ac_option: Annotated[Count | None, OnlyWith("ac_mode", ("selective",))] = None
    """Interval of recomputed layers with ``ac_mode: selective``."""
    custom_sharded_layers: list[str] | None = None
    """Modules that FSDP2 shards as separate units, besides each layer."""
    fsdp_cpu_offload: bool = False
    """Keeps parameters, gradients and optimizer state on the CPU."""
    fsdp: dict[Literal["cpu_offload"], bool] | None = None
    """``cpu_offload``: the same as ``fsdp_cpu_offload``, for torchtune's LoRA configs."""
    fsdp_reshard_after_forward: bool | None = None
    """Frees gathered parameters after each forward; null is True, and False with pipeline
    stages."""
    quantizer: Component | None = None
    """Quantization-aware training: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer."""
    tensor_parallel_plan: Component | None = None
    """Split of layers over ``tensor_parallel_dim`` ranks: torchtune.models.llama3.base_llama_tp_plan."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Precision of forward and backward, and of frozen weights."""
        return _DTYPES[self.dtype or "fp32"]

    @property
    def torch_weights_dtype(self) -> torch.dtype:
        """Precision of trained weights, their summed gradients and optimizer state."""
        return _DTYPES[self.weights_dtype or self.dtype or "fp32"]

    def offloads_to_cpu(self, device: torch.device) -> bool:
        """Returns True if FSDP2 keeps its shards on the CPU while computing on ``device``."""
        offloads = self.fsdp_cpu_offload or (self.fsdp or {}).get("cpu_offload", False)
        return offloads and device.type != "cpu"

    def without_gradients(self, **changes: Any) -> "ModelSettings":
        """Returns the settings of a model without gradients."""
        return replace(
            self,
            enable_activation_checkpointing=False,
            enable_activation_offloading=False,
            ac_mode=None,
            weights_dtype=None,
            **changes,
        )

    def offloading(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Returns the forward's context, which offloads activations if configured."""
        context: AbstractContextManager[Any] = training.get_act_offloading_ctx_manager(
            model, self.enable_activation_offloading
        )
        return context

    def problems(self) -> Iterator[Problem]:
        """Yields conflicts between keys."""
        if self.enable_activation_offloading and not self.enable_activation_checkpointing:
            text = "it needs enable_activation_checkpointing=True"
            yield self._problem("enable_activation_offloading", text)
        if self.enable_activation_checkpointing and self.ac_mode is not None:
            text = (
                "enable_activation_checkpointing=True recomputes all layers already; set one of the two to "
                "null or False"
            )
            yield self._problem("ac_mode", text)
        if self.ac_mode == "selective" and self.ac_option is None:
            text = "set ac_option, too: every how many-th layer is recomputed"
            yield self._problem("ac_mode", text)
        if self.torch_weights_dtype.itemsize < self.torch_dtype.itemsize:
            text = (
                f"dtype={self.dtype or 'fp32'} would compute in more digits than the weights keep; set "
                "weights_dtype to null, or dtype to that of the weights"
            )
            yield self._problem("weights_dtype", text)
        try:
            device = resolve_device(self.device)
        except ValueError:
            return
        yield from self._problems_of_kernels(device)
        offloading = "enable_activation_offloading"
        if self.enable_activation_offloading and self.pipeline_parallel_dim > 1:
            text = f"it does not support pipeline_parallel_dim={self.pipeline_parallel_dim}; set it to False"
            yield self._problem(offloading, text)
        if self.enable_activation_offloading and device.type != "cuda":
            yield self._problem(offloading, "it needs device=cuda; set it to False")
        if self.dtype is not None:
            try:
                training.get_dtype(self.dtype, device=device)
            except Exception as error:
                yield self._problem("dtype", f"{error}; set it to fp32")
        if self.tensor_parallel_dim > 1 and self.tensor_parallel_plan is None:
            text = "set tensor_parallel_plan, too, such as torchtune.models.llama3.base_llama_tp_plan"
            yield self._problem("tensor_parallel_dim", text)
        if self.tensor_parallel_dim > 1 and self.quantizer is not None:
            text = "a quantizer needs whole weights; set tensor_parallel_dim=1"
            yield self._problem("tensor_parallel_dim", text)

    def _problems_of_kernels(self, device: torch.device) -> Iterator[Problem]:
        kernel = self.packed_attention
        if kernel in ("varlen", "flex") and device.type != "cuda":
            text = f"it needs device=cuda; on device={device.type} leave it out, or set packed_attention=by_document"
            yield self._problem("packed_attention", text)
        missing = missing_for_triton()
        by_triton = os.environ.get("TORCH_COMPILE_BACKEND", "inductor") == "inductor"
        if self.compile and device.type == "cuda" and by_triton and missing is not None:
            text = f"Triton needs {missing}; install that, or set compile=False"
            yield self._problem("compile", text)

    def _problem(self, key: str, text: str) -> Problem:
        return Problem(key, text, getattr(self, key))


def build_on_meta(make_model: Callable[[], nn.Module], settings: ModelSettings) -> nn.Module:
    """Calls ``make_model`` without allocating or initializing weights; freezes all but the adapters, if any.

    Raises ConfigError if the ``quantizer`` does not fit the model, ValueError if tables of positions
    are larger than this machine's memory.
    """
    default_dtype = training.set_default_dtype(settings.torch_dtype)
    with default_dtype, torch.device("meta"), without_quantizing():
        model = make_model()
        if settings.quantizer is not None:
            simulate_quantization(model, settings.quantizer)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Sines and cosines in fp32; on the meta device, scaled RoPE makes no table.
    ropes: list[Any] = [m for m in model.modules() if hasattr(m, "rope_init") and hasattr(m, "dim")]
    if (tables := sum(4 * rope.dim * getattr(rope, "max_seq_len", 0) for rope in ropes)) > memory:
        raise ValueError(
            f"its tables, of max_seq_len positions, take {tables / 2**30:.0f} GiB of the machine's "
            f"{memory / 2**30:.0f}; set a smaller max_seq_len"
        )
    drop_upcast_hooks(model)
    freeze_base(model)
    model.packed_attention = settings.packed_attention  # type: ignore[assignment]
    return model


def build_model(
    make_model: Callable[[], nn.Module],
    prepare: Callable[[nn.Module, bool], None],
    settings: ModelSettings,
    ranks: Ranks,
) -> nn.Module:
    """Builds this rank's modules without weights: the whole model, or its pipeline stages.

    ``prepare`` changes a model or stage before it is wrapped; its second argument is True if the
    output layer is in it. Raises ValueError if the model cannot be cut, split or sharded as configured.
    """
    make = partial(build_on_meta, make_model, settings)
    whole = make()
    adapters = find_adapters(whole)
    names_of_modules = {name.rpartition(".")[2] for name, _ in whole.named_modules()}
    for name in settings.custom_sharded_layers or ():
        if name.rpartition(".")[2] not in names_of_modules:
            raise ValueError(f"custom_sharded_layers={name}: the model has no such module")
    if ranks.dims.pp == 1:
        prepare(whole, True)
        return parallelize_model(whole, settings, ranks)

    num_stages = settings.num_stages(ranks.dims.pp)
    layers = layers_of_stages(whole, num_stages, settings.pipeline_parallel_split_points)
    _check_that_all_train(whole, layers)
    embed_dim: Any = whole.tok_embeddings.embedding_dim  # type: ignore[union-attr]
    names = list(whole.state_dict())
    stages = Stages(WholeModel(names, num_stages, embed_dim, ties_output(whole), adapters))
    for index in stages_of_rank(ranks.pp_rank, ranks.dims.pp, num_stages):
        stage = make()
        cut_to_stage(stage, layers[index])
        prepare(stage, index == num_stages - 1)
        stages[f"stage_{index}"] = parallelize_model(stage, settings, ranks)
    if ranks.is_zero:
        _log.info(
            f"{settings.pipeline_parallel_schedule} over {ranks.dims.pp} ranks; layers of the stages: "
            + ", ".join(f"{of_stage.start} to {of_stage.stop - 1}" for of_stage in layers)
        )
    return stages


def _check_that_all_train(whole: Any, layers: list[range]) -> None:
    for index, of_stage in enumerate(layers):
        parts = [whole.layers[i] for i in of_stage]
        if of_stage.stop == len(whole.layers) and isinstance(whole.output, nn.Module):  # not tied
            parts.append(whole.output)
        if not any(p.requires_grad for part in parts for p in part.parameters()):
            raise ValueError(
                f"pipeline_parallel_dim: stage {index} of {len(layers)} has nothing to train; set a smaller "
                "pipeline_parallel_dim, or adapters in all layers"
            )


def count_trained(model: nn.Module, group: dist.ProcessGroup) -> int:
    """Returns the trained parameters of a model that may be sharded, or in stages on several ranks of ``group``."""
    numels = {name: p.numel() for name, p in parameters_by_name(model).items()}
    merged: dict[str, int] = {}
    for of_rank in gather_objects(numels, group):
        merged |= of_rank
    return sum(merged.values())


def describe_model(meta_model: nn.Module, num_trained: int, settings: Any, device: torch.device) -> str:
    """Returns a line with a model's name, parameters, precision and device; ``meta_model`` is whole."""
    name, adapters = settings.model["_component_"].rpartition(".")[2], find_adapters(meta_model)
    num_all = sum(p.numel() for p in meta_model.parameters())
    trained = "all trained" if num_trained == num_all else f"{num_trained:,} of them trained"
    if adapters.modules:
        trained += f" (adapters of {adapters_in_words(meta_model, adapters)})"
    dtypes = [settings.dtype or "fp32"]
    if settings.torch_weights_dtype != settings.torch_dtype:
        dtypes.append(f"trained weights in {settings.weights_dtype}")
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        device_name = f"{found.name} ({found.total_memory / 2**30:.0f} GiB)"
    else:
        device_name = device.type
    parts = f"{num_all:,} parameters", trained, *dtypes, f"on {device_name}"
    compiles = "; compile=True: the first update steps also compile" if settings.compile else ""
    return f"Model: {settings.model.get('path', name)}, {', '.join(parts)}{compiles}"


def parallelize_model(model: nn.Module, settings: ModelSettings, ranks: Ranks) -> nn.Module:
    """Applies compile, tensor parallelism, activation checkpointing and FSDP2 to a meta model, in that order.

    FSDP2 also casts weights to the compute precision, even on a single rank. Raises ValueError if the
    model cannot be split or sharded as configured.
    """
    decoder: Any = getattr(model, "decoder", model)
    own_units = [layer.rsplit(".")[-1] for layer in settings.custom_sharded_layers or ()]
    if isinstance(decoder.output, TiedLinear) and "tok_embeddings" in own_units:
        raise ValueError(
            f"custom_sharded_layers={settings.custom_sharded_layers}: this model's output layer "
            "shares the weight of tok_embeddings and could not read it; leave tok_embeddings out"
        )
    tp_degree, adapters, reason = ranks.dims.tp, find_adapters(model), ""
    if hasattr(model, "proof"):
        reason = f"{type(decoder.model).__name__} of transformers cannot be split"
    elif isinstance(decoder.output, TiedLinear):
        reason = "torchtune's plans cannot split the weight that output layer and tok_embeddings share"
    elif adapters.modules:
        reason = "torchtune's plans cannot split LoRA's layers"
    if tp_degree > 1 and reason:
        text = f"tensor_parallel_dim={tp_degree}: {reason}; set tensor_parallel_dim=1"
        raise ValueError(text)
    is_sharded = ranks.dp_degree > 1 or settings.offloads_to_cpu(ranks.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    is_cast = settings.torch_weights_dtype != settings.torch_dtype and bool(trained)
    for parameter in trained if is_cast else ():
        parameter.data = parameter.data.to(settings.torch_weights_dtype)
    check_nf4(model, adapters.frozen, ranks.dims.dp_shard if is_sharded else None)
    if settings.compile:
        configure_compiler()
        if isinstance(layers := getattr(model, "layers", None), list):  # of transformers
            for layer in layers:
                layer.compile(backend=os.environ.get("TORCH_COMPILE_BACKEND", "inductor"))
        else:
            training.compile_model(model, verbose=ranks.is_zero)
    else:
        fuse_norms_and_rope(model)
    if tp_degree > 1:
        model = training.prepare_mha_for_tp(model, ranks.mesh["tp"])
        plan = dict(config.instantiate(OmegaConf.create(settings.tensor_parallel_plan)))
        parallelize_module(model, ranks.mesh["tp"], parallelize_plan=plan)
    recomputes = settings.enable_activation_checkpointing or settings.ac_mode is not None
    if recomputes and hasattr(model, "recompute_layers"):
        model.recompute_layers(settings.ac_option or 1)  # type: ignore[operator]
    elif settings.enable_activation_checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    elif settings.ac_mode is not None:
        apply_selective_activation_checkpointing(model, settings.ac_mode, settings.ac_option)
        for module in model.modules():
            if isinstance(module, CheckpointWrapper):  # torchtune's would draw other masks of dropout
                module.checkpoint_fn.keywords["preserve_rng_state"] = True
    if is_sharded or is_cast:
        # On a single rank FSDP2 would copy frozen weights at each all-gather, so they stay outside of it.
        frozen = [] if is_sharded else [p for p in model.parameters() if not p.requires_grad]
        reshards = settings.fsdp_reshard_after_forward
        shard_model(
            model,
            ranks.mesh,
            custom_sharded_layers=settings.custom_sharded_layers,
            cpu_offload=settings.offloads_to_cpu(ranks.device),
            # A stage soon needs its weights for the next microbatch.
            reshard_after_forward=ranks.dims.pp == 1 if reshards is None else reshards,
            compute_dtype=settings.torch_dtype if is_cast else None,
            ignored=frozen,
        )
    return model
