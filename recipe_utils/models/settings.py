"""Keys of a model: precision, memory savings and kernels."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import nn
from torchtune import training

from recipe_utils.models.attention.kernels import missing_for_triton
from recipe_utils.parallel.ranks import resolve_device
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.settings.components import Component
from recipe_utils.settings.keys import STRICT, Count, OnlyWith
from recipe_utils.settings.problems import Problem
from recipe_utils.torchtune_names import get_dtype

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
    """Recomputes all layers (``full``) or some (``selective``); replaces ``enable_activation_checkpointing``."""
    ac_option: Annotated[Count | None, OnlyWith("ac_mode", ("selective",))] = None
    """Interval of recomputed layers with ``ac_mode: selective``."""
    custom_sharded_layers: list[str] | None = None
    """Modules that FSDP2 shards as separate units, besides each layer."""
    fsdp_cpu_offload: bool = False
    """Keeps parameters, gradients and optimizer state on the CPU."""
    fsdp: dict[Literal["cpu_offload"], bool] | None = None
    """``cpu_offload``: the same as ``fsdp_cpu_offload``, for torchtune's LoRA configs."""
    fsdp_reshard_after_forward: bool | None = None
    """Frees gathered parameters after each forward; null is True, and False with pipeline stages."""
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
            yield self.problem_of("enable_activation_offloading", "it needs enable_activation_checkpointing=True")
        if self.enable_activation_checkpointing and self.ac_mode is not None:
            text = (
                "enable_activation_checkpointing=True recomputes all layers already; set one of the two to "
                "null or False"
            )
            yield self.problem_of("ac_mode", text)
        if self.ac_mode == "selective" and self.ac_option is None:
            yield self.problem_of("ac_mode", "set ac_option, too: every how many-th layer is recomputed")
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
    if model.packed_attention in ("varlen", "flex") and device.type != "cuda":
        text = f"it needs device=cuda; on device={device.type} leave it out, or set packed_attention=by_document"
        yield model.problem_of("packed_attention", text)
    missing = missing_for_triton()
    by_triton = os.environ.get("TORCH_COMPILE_BACKEND", "inductor") == "inductor"
    if model.compile and device.type == "cuda" and by_triton and missing is not None:
        yield model.problem_of("compile", f"Triton needs {missing}; install that, or set compile=False")
    offloading = "enable_activation_offloading"
    if model.enable_activation_offloading and ranks.pipeline_parallel_dim > 1:
        text = f"it does not support pipeline_parallel_dim={ranks.pipeline_parallel_dim}; set it to False"
        yield model.problem_of(offloading, text)
    if model.enable_activation_offloading and device.type != "cuda":
        yield model.problem_of(offloading, "it needs device=cuda; set it to False")
    if model.dtype is not None:
        try:
            get_dtype(model.dtype, device=device)
        except Exception as error:
            yield model.problem_of("dtype", f"{error}; set it to fp32")
    tp_degree = ranks.tensor_parallel_dim
    if tp_degree > 1 and model.tensor_parallel_plan is None:
        text = "set tensor_parallel_plan, too, such as torchtune.models.llama3.base_llama_tp_plan"
        yield Problem("tensor_parallel_dim", text, tp_degree)
    if tp_degree > 1 and model.quantizer is not None:
        yield Problem("tensor_parallel_dim", "a quantizer needs whole weights; set tensor_parallel_dim=1", tp_degree)
