"""DoRA's norms, formed once per update step."""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchao.dtypes.nf4tensor import linear_nf4
from torchtune.modules.peft import DoRALinear

from recipe_utils.model.nf4 import is_quantised
from recipe_utils.optim.optimizer import OptimizerInBackward, single_optimizers


def keep_dora_norms(model: nn.Module, optimizer: Optimizer | OptimizerInBackward) -> None:
    """Lets DoRA form its norms once per update step instead of in each forward and recomputation.

    They are detached from the graph (section 4.3 of the paper) and depend on weights alone, which change
    when an optimizer steps.

    Args:
        model: on its device; sharded or not, or the stages on this rank.
        optimizer: of its adapters.
    """
    layers = [module for module in model.modules() if isinstance(module, DoRALinear)]
    if not layers:
        return
    for layer in layers:
        layer._norm = None
        layer.forward = MethodType(_forward_with_kept_norm, layer)

    def forget(*_: Any) -> None:
        for layer in layers:
            layer._norm = None

    for each in single_optimizers(optimizer):
        each.register_step_post_hook(forget)


def _forward_with_kept_norm(layer: Any, x: Tensor) -> Tensor:
    """[..., i] -> [..., o], as torchtune's ``DoRALinear.forward``, with the norm [o] of W + (alpha / r) B A kept.

    A bias is added as it is, as in the paper and in PEFT; torchtune scales it with the weight's rows.
    """
    if is_quantised(layer):
        base = linear_nf4(input=x, weight=layer.weight)
    else:
        base = F.linear(x, layer.weight)
    if not layer.disabled:
        if layer._norm is None:
            with torch.no_grad():
                # FSDP2 holds the layer's weights gathered here.
                change = layer.scaling * (layer.lora_b.weight @ layer.lora_a.weight)
                layer._norm = torch.linalg.norm(layer.weight.to(x.dtype) + change, dim=1)
        adapted = layer.scaling * layer.lora_b(layer.lora_a(layer.dropout(x)))
        base = (layer.magnitude / layer._norm) * (base + adapted)
    return base if layer.bias is None else base + layer.bias
