"""LoRA and DoRA layers with fewer passes over activations; DoRA's norms are computed once per update step.

Shapes: x [..., i], W [o, i], A [r, i], B [o, r]; s is alpha / r.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchao.dtypes.nf4tensor import linear_nf4
from torchtune.modules.peft import DoRALinear, LoRALinear

from recipe_utils.models.adapters.nf4 import is_quantized
from recipe_utils.optim.optimizer import OptimizerInBackward, single_optimizers


def speed_up_adapters(model: nn.Module, optimizer: Optimizer | OptimizerInBackward) -> None:
    """Replaces the forwards of LoRA and DoRA layers, in place, without changing what they compute.

    DoRA's norms are detached from the graph (section 4.3 of the paper) and depend on weights alone,
    so they are computed once per optimizer step. A bias is added unscaled, as in the paper and in
    PEFT; torchtune scales it with DoRA's rows.

    The model is on its device: whole, sharded, or this rank's stages.
    """
    for layer in model.modules():
        if isinstance(layer, LoRALinear) and "forward" not in vars(layer):  # else QAT replaced it
            layer.forward = MethodType(_forward_lora, layer)
    with_norms: list[Any] = [layer for layer in model.modules() if isinstance(layer, DoRALinear)]
    for layer in with_norms:
        layer._norm = None
        layer.forward = MethodType(_forward_dora, layer)

    def forget(*_: Any) -> None:
        for layer in with_norms:
            layer._norm = None

    if with_norms:
        for each in single_optimizers(optimizer):
            each.register_step_post_hook(forget)


def forget_norms(model: nn.Module) -> None:
    """Makes DoRA layers compute their norms again, because weights have changed."""
    for layer in model.modules():
        if isinstance(layer, DoRALinear):
            layer._norm = None


def _forward_lora(layer: Any, x: Tensor) -> Tensor:
    """Computes x (W + s B A)^T + bias."""
    return _add_bias(_times_adapted_weight(layer, x, layer.alpha / layer.rank), layer)


def _forward_dora(layer: Any, x: Tensor) -> Tensor:
    """Computes x (W + s B A)^T * magnitude / norm of its rows + bias."""
    if layer.disabled:
        return _add_bias(_times_weight(layer, x), layer)
    if layer._norm is None:
        with torch.no_grad():
            # FSDP2 keeps the layer's weights gathered here.
            change = layer.scaling * (layer.lora_b.weight @ layer.lora_a.weight)
            layer._norm = torch.linalg.norm(layer.weight.to(x.dtype) + change, dim=1)
    product = _times_adapted_weight(layer, x, layer.scaling)
    return _add_bias(layer.magnitude / layer._norm * product, layer)


def _times_weight(layer: Any, x: Tensor) -> Tensor:
    if is_quantized(layer):
        return linear_nf4(input=x, weight=layer.weight)
    return F.linear(x, layer.weight)


def _times_adapted_weight(layer: Any, x: Tensor, scaling: float) -> Tensor:
    """Computes x (W + s B A)^T, or x W^T if adapters are disabled."""
    if layer.disabled:
        return _times_weight(layer, x)
    a, b = layer.lora_a.weight, layer.lora_b.weight
    fuses = (
        not is_quantized(layer)
        and isinstance(layer.dropout, nn.Identity)
        and not layer.weight.requires_grad
        and not isinstance(a, DTensor)  # an adapter sharded as its own FSDP2 unit is gathered only by its own call
        and not torch.compiler.is_compiling()  # the compiler fuses, too
    )
    if fuses:
        product: Tensor = _AdaptedProduct.apply(x, layer.weight, a, b, scaling)
        return product
    return _times_weight(layer, x) + scaling * layer.lora_b(layer.lora_a(layer.dropout(x)))


def _add_bias(product: Tensor, layer: Any) -> Tensor:
    return product if layer.bias is None else product + layer.bias


class _AdaptedProduct(torch.autograd.Function):
    """x W^T + s (x A^T) B^T for a frozen W.

    Sums are accumulated within matrix products and only tensors with r columns are scaled, which
    saves three passes over [n, o] and one over [n, i].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """Computes [..., o] from x [..., i]."""
        reduced = F.linear(x, a)
        product = F.linear(x, weight)
        product.flatten(0, -2).addmm_(reduced.flatten(0, -2), b.t(), alpha=scaling)
        ctx.save_for_backward(x, weight, a, b, reduced)
        ctx.scaling = scaling
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of x, A and B from that of the output [..., o]."""
        x, weight, a, b, reduced = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        grad_reduced = (grad @ b).mul_(ctx.scaling)
        grad_b = (grad.t() @ reduced.flatten(0, -2)).mul_(ctx.scaling)
        grad_a = grad_reduced.t() @ x.flatten(0, -2)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_reduced, a).view(x.shape)
        return grad_x, None, grad_a, grad_b, None
