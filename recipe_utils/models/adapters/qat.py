"""Training for weights that will be quantized: the forward fake-quantizes them and their inputs."""

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchao.quantization.qat import FakeQuantizerBase
from torchtune.modules.peft import LoRALinear, get_adapter_params
from torchtune.training.quantization import get_quantizer_mode

from recipe_utils.models.adapters.nf4 import is_quantized
from recipe_utils.settings.problems import ConfigError
from recipe_utils.torchtune_names import instantiate


def simulate_quantization(model: nn.Module, quantizer: Mapping[str, Any]) -> None:
    """Fake-quantizes linear layers and their inputs, in place: LoRA's frozen weights, or without adapters all.

    As in torchtune, embeddings stay as they are, and so do output layers that are tied to them.
    Replaces torchtune's ``QATLoRALinear``, which does not run with torchao 0.17, and computes what
    torchao's ``prepare`` does, whose layers would have to be allocated.

    The model is on the meta device; ``quantizer`` is one of torchtune's QAT quantizers. Raises ConfigError if the model
    has other adapters or a quantized base; or the quantizer is not for training, or its group size does not fit.
    """
    path = quantizer["_component_"]
    kind = LoRALinear if get_adapter_params(model) else nn.Linear
    layers: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    if not layers:
        raise ConfigError(f"quantizer={path}: it is not for DoRA; take it out, or set model.use_dora=False")
    if any(is_quantized(module) for module in model.modules()):
        raise ConfigError(
            f"quantizer={path}: model.quantize_base=True keeps NF4 weights; set one of the two to null or False"
        )
    # Its own fake quantizers, in place of its layers, which would be allocated.
    made = instantiate(OmegaConf.create(dict(quantizer)))
    if "qat" not in (get_quantizer_mode(made) or ""):
        raise ConfigError(
            f"quantizer={path}: it cannot be trained with; set "
            "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
        )
    made.precision = torch.get_default_dtype()
    cfg_inputs, cfg_weights = made.get_activation_fake_quantize_config(), made.get_weight_fake_quantize_config()
    for layer in layers:
        width = layer.weight.shape[1]
        if cfg_weights is not None and ((size := cfg_weights.group_size) < 1 or width % size):
            raise ConfigError(f"quantizer.groupsize={size}: it does not divide {width}, a layer's width; set a divisor")
        layer.activation_fake_quantizer = _fake_quantizer(cfg_inputs)
        layer.weight_fake_quantizer = _fake_quantizer(cfg_weights)
        layer.forward = MethodType(_forward_fake_quantized, layer)


def _fake_quantizer(cfg: Any) -> nn.Module:
    return nn.Identity() if cfg is None else FakeQuantizerBase.from_config(cfg)


def _forward_fake_quantized(layer: Any, x: Tensor) -> Tensor:
    """Computes [..., o] from x [..., i]."""
    weight = layer.weight_fake_quantizer(layer.weight)
    base = F.linear(layer.activation_fake_quantizer(x), weight, layer.bias)
    if isinstance(layer, nn.Linear) or layer.disabled:
        return base
    return base + layer.alpha / layer.rank * layer.lora_b(layer.lora_a(layer.dropout(x)))
