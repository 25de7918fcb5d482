"""Builds a model on the meta device, and cuts it into pipeline stages."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import nn
from torchtune import training
from torchtune.utils import get_logger

from recipe_utils.models.adapters.lora import adapters_in_words, find_adapters, freeze_base
from recipe_utils.models.adapters.nf4 import drop_upcast_hooks, without_quantizing
from recipe_utils.models.adapters.qat import simulate_quantization
from recipe_utils.models.attention.packed_attention import missing_for_triton
from recipe_utils.models.pipeline.schedule import PipelineSettings, stages_of_rank
from recipe_utils.models.pipeline.stages import Stages, WholeModel, cut_to_stage, layers_of_stages, ties_output
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


def build_stages(meta_model: nn.Module, settings: ModelSettings, ranks: Ranks) -> nn.Module:
    """Returns this rank's modules on the meta device: a copy of the model, or :class:`.Stages` of copies.

    Layers that are frozen in ``meta_model`` and modules added to it are so in the stages. Raises ValueError if the
    model cannot be cut, or has no module of ``custom_sharded_layers``.
    """
    last_names = {name.rpartition(".")[2] for name, _ in meta_model.named_modules()}
    for name in settings.custom_sharded_layers or ():
        if name.rpartition(".")[2] not in last_names:
            raise ValueError(f"custom_sharded_layers={name}: the model has no such module")
    if ranks.dims.pp == 1:
        return copy.deepcopy(meta_model)

    whole: Any = meta_model
    num_stages = settings.num_stages(ranks.dims.pp)
    layers = layers_of_stages(whole, num_stages, settings.pipeline_parallel_split_points)
    _check_that_all_train(whole, layers)
    stages = Stages(
        WholeModel(
            list(whole.state_dict()),
            num_stages,
            whole.tok_embeddings.embedding_dim,
            ties_output(whole),
            find_adapters(whole),
        )
    )
    for index in stages_of_rank(ranks.pp_rank, ranks.dims.pp, num_stages):
        stages[f"stage_{index}"] = stage = copy.deepcopy(whole)
        cut_to_stage(stage, layers[index])
    if ranks.is_zero:
        _log.info(
            f"{settings.pipeline_parallel_schedule} over {ranks.dims.pp} ranks; layers of the stages: "
            + ", ".join(f"{of_stage.start} to {of_stage.stop - 1}" for of_stage in layers)
        )
    return stages


def _check_that_all_train(meta_model: Any, layers: list[range]) -> None:
    for index, layers_of_stage in enumerate(layers):
        parts = [meta_model.layers[i] for i in layers_of_stage]
        if layers_of_stage.stop == len(meta_model.layers) and isinstance(meta_model.output, nn.Module):  # not tied
            parts.append(meta_model.output)
        if not any(p.requires_grad for part in parts for p in part.parameters()):
            raise ValueError(
                f"pipeline_parallel_dim: stage {index} of {len(layers)} has nothing to train; set a smaller "
                "pipeline_parallel_dim, or train some weights of all layers"
            )


def describe_model(meta_model: nn.Module, settings: Any, device: torch.device) -> str:
    """Returns a line with a model's name, parameters, precision and device."""
    name, adapters = settings.model["_component_"].rpartition(".")[2], find_adapters(meta_model)
    num_trained = sum(p.numel() for p in meta_model.parameters() if p.requires_grad)
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
