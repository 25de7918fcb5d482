"""Builds a model on the meta device, and cuts it into pipeline stages."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from omegaconf import DictConfig
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
from recipe_utils.parallel.ranks import Ranks, RankSettings, resolve_device
from recipe_utils.settings.components import Component
from recipe_utils.settings.keys import STRICT, Count, OnlyWith
from recipe_utils.settings.problems import ConfigError, Problem

_log = get_logger("INFO")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, config=STRICT)
class ModelSettings:
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
            yield self.problem_of("enable_activation_offloading", text)
        if self.enable_activation_checkpointing and self.ac_mode is not None:
            text = (
                "enable_activation_checkpointing=True recomputes all layers already; set one of the two to "
                "null or False"
            )
            yield self.problem_of("ac_mode", text)
        if self.ac_mode == "selective" and self.ac_option is None:
            text = "set ac_option, too: every how many-th layer is recomputed"
            yield self.problem_of("ac_mode", text)
        if self.torch_weights_dtype.itemsize < self.torch_dtype.itemsize:
            text = (
                f"dtype={self.dtype or 'fp32'} would compute in more digits than the weights keep; set "
                "weights_dtype to null, or dtype to that of the weights"
            )
            yield self.problem_of("weights_dtype", text)

    def problem_of(self, key: str, text: str) -> Problem:
        """Returns a problem of a key of this class."""
        return Problem(key, text, getattr(self, key))


def model_on_ranks(model: ModelSettings, ranks: RankSettings) -> Iterator[Problem]:
    """Yields what the device and the ranks do not support."""
    try:
        device = resolve_device(ranks.device)
    except ValueError:  # a problem of ``device`` by itself
        return
    yield from _kernels_on_device(model, device)
    offloading = "enable_activation_offloading"
    if model.enable_activation_offloading and ranks.pipeline_parallel_dim > 1:
        text = f"it does not support pipeline_parallel_dim={ranks.pipeline_parallel_dim}; set it to False"
        yield model.problem_of(offloading, text)
    if model.enable_activation_offloading and device.type != "cuda":
        yield model.problem_of(offloading, "it needs device=cuda; set it to False")
    if model.dtype is not None:
        try:
            training.get_dtype(model.dtype, device=device)
        except Exception as error:
            yield model.problem_of("dtype", f"{error}; set it to fp32")
    tp_degree = ranks.tensor_parallel_dim
    if tp_degree > 1 and model.tensor_parallel_plan is None:
        text = "set tensor_parallel_plan, too, such as torchtune.models.llama3.base_llama_tp_plan"
        yield Problem("tensor_parallel_dim", text, tp_degree)
    if tp_degree > 1 and model.quantizer is not None:
        text = "a quantizer needs whole weights; set tensor_parallel_dim=1"
        yield Problem("tensor_parallel_dim", text, tp_degree)


def _kernels_on_device(model: ModelSettings, device: torch.device) -> Iterator[Problem]:
    if model.packed_attention in ("varlen", "flex") and device.type != "cuda":
        text = f"it needs device=cuda; on device={device.type} leave it out, or set packed_attention=by_document"
        yield model.problem_of("packed_attention", text)
    missing = missing_for_triton()
    by_triton = os.environ.get("TORCH_COMPILE_BACKEND", "inductor") == "inductor"
    if model.compile and device.type == "cuda" and by_triton and missing is not None:
        text = f"Triton needs {missing}; install that, or set compile=False"
        yield model.problem_of("compile", text)


def build_on_meta(make_model: Callable[[], nn.Module], settings: ModelSettings) -> nn.Module:
    """Calls ``make_model`` without allocating or initializing weights; freezes all but the adapters, if any.

    Raises ConfigError if ``quantizer`` or ``custom_sharded_layers`` do not fit the model, ValueError if tables of
    positions are larger than this machine's memory.
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
    last_names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for name in settings.custom_sharded_layers or ():
        if name.rpartition(".")[2] not in last_names:
            raise ConfigError(Problem("custom_sharded_layers", "the model has no such module", name))
    drop_upcast_hooks(model)
    freeze_base(model)
    model.packed_attention = settings.packed_attention  # type: ignore[assignment]
    return model


def build_stages(meta_model: nn.Module, pipeline: PipelineSettings, ranks: Ranks) -> nn.Module:
    """Returns this rank's modules on the meta device: a copy of the model, or :class:`.Stages` of copies.

    Stages have the layers that were frozen in ``meta_model`` and the modules that were added to it. Raises ValueError
    if the model cannot be cut.
    """
    if ranks.dims.pp == 1:
        return copy.deepcopy(meta_model)

    whole: Any = meta_model
    num_stages = pipeline.num_stages(ranks.dims.pp)
    layers = layers_of_stages(whole, num_stages, pipeline.pipeline_parallel_split_points)
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
            f"{pipeline.pipeline_parallel_schedule} over {ranks.dims.pp} ranks; layers of the stages: "
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


def describe_model(meta_model: nn.Module, cfg: DictConfig, device: torch.device) -> str:
    """Returns a line with a model's name, parameters, precision and device; ``cfg`` is the recipe's."""
    name, adapters = cfg.model["_component_"].rpartition(".")[2], find_adapters(meta_model)
    num_trained = sum(p.numel() for p in meta_model.parameters() if p.requires_grad)
    num_all = sum(p.numel() for p in meta_model.parameters())
    trained = "all trained" if num_trained == num_all else f"{num_trained:,} of them trained"
    if adapters.modules:
        trained += f" (adapters of {adapters_in_words(meta_model, adapters)})"
    dtypes = [cfg.get("dtype") or "fp32"]
    if cfg.get("weights_dtype") not in (None, *dtypes):
        dtypes.append(f"trained weights in {cfg.weights_dtype}")
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        device_name = f"{found.name} ({found.total_memory / 2**30:.0f} GiB)"
    else:
        device_name = device.type
    parts = f"{num_all:,} parameters", trained, *dtypes, f"on {device_name}"
    compiles = "; compile=True: the first update steps also compile" if cfg.get("compile") else ""
    return f"Model: {cfg.model.get('path', name)}, {', '.join(parts)}{compiles}"
