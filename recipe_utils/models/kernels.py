"""torchtune's norms and rotary positions with fewer passes over activations.

On a CPU, outputs and gradients are bitwise equal to torchtune's. On CUDA, norms are PyTorch's fused kernel, which
rounds as often as torchtune's norm does (once) but adds in another order. torchtune's norm upcasts bf16 activations and
not its scale, so PyTorch warns "Cannot dispatch to fused implementation" and runs several kernels. Compiled layers stay
as they are, since the compiler fuses better; their tracing gives that warning, too.

Shapes: b rows, s positions per row, h heads, d width of a head or of the model.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.modules import RMSNorm, RotaryPositionalEmbeddings


def fuse_norms_and_rope(model: nn.Module) -> None:
    """Replaces the forwards of torchtune's norms and rotary positions (Llama 3.1's, too), in place.

    Other modules and DTensors (tensor parallel) keep their own forward; weights keep their names.
    """
    for module in model.modules():
        if type(module) is RMSNorm:
            module.forward = MethodType(_normalize, module)
        elif type(module) in (RotaryPositionalEmbeddings, Llama3ScaledRoPE):
            module.forward = MethodType(_rotate, module)


def _normalize(norm: Any, x: Tensor) -> Tensor:
    """Applies RMSNorm over the last dimension as torchtune does (Zhang and Sennrich, arXiv:1910.07467)."""
    if isinstance(x, DTensor) or isinstance(norm.scale, DTensor):
        return type(norm).forward(norm, x)
    if x.device.type != "cpu":
        # One kernel, internally in fp32, for equal dtypes; torchtune's would upcast x and run six.
        return F.rms_norm(x, norm.normalized_shape, norm.scale.to(x.dtype), norm.eps)
    wide = x.float()
    if wide.dtype.itemsize < norm.scale.dtype.itemsize:  # torchtune computes fp64 models so, too
        return type(norm).forward(norm, x)
    normed: Tensor = _RMSNorm.apply(wide, norm.scale, norm.eps)
    return normed.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm on a CPU, for which PyTorch has no fused kernel.

    The operations and their order are autograd's for torchtune's norm, except that numbers per row
    are not expanded to whole activations, and results that can be recomputed are not saved.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """Normalizes x [..., d] and multiplies with scale [d]."""
        inverse = x.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, inverse)
        return x * inverse * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Computes g * r - x * r^3 * sum(g * x) / d, with r = 1 / rms(x) and g = grad * scale."""
        x, scale, inverse = ctx.saved_tensors
        grad_x = grad_scale = None
        if ctx.needs_input_grad[1]:
            grad_scale = (x * inverse).mul_(grad).sum(tuple(range(x.dim() - 1)))
        if ctx.needs_input_grad[0]:
            grad_normed = (grad * scale).to(x.dtype)
            grad_inverse = (grad_normed * x).sum(-1, keepdim=True)
            # Multiplying by -0.5 and 2 is exact.
            factor = grad_inverse.mul_(-0.5).mul_(inverse.pow(3)).div_(x.size(-1)).mul_(2)
            grad_x = grad_normed.mul_(inverse).add_(x * factor)
        return grad_x, grad_scale, None


def _rotate(rope: Any, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
    """Rotates neighboring channels of x [b, s, h, d] by their position's angle (RoFormer, arXiv:2104.09864)."""
    cache = rope.cache[: x.size(1)] if input_pos is None else rope.cache[input_pos]
    if isinstance(x, DTensor) or isinstance(cache, DTensor):
        return type(rope).forward(rope, x, input_pos=input_pos)
    turn = torch.view_as_complex(cache.float()).view(-1, x.size(1), 1, x.size(-1) // 2)
    turned: Tensor = _Turned.apply(x.float(), turn)
    return turned.type_as(x)


class _Turned(torch.autograd.Function):
    """Pairs of channels as complex numbers, multiplied with numbers of modulus 1; backward uses their conjugates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Tensor) -> Tensor:
        ctx.save_for_backward(turn)
        return _times(x, turn)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (turn,) = ctx.saved_tensors
        return _times(grad, turn.conj_physical()), None


def _times(x: Tensor, turn: Tensor) -> Tensor:
    # No view, because Gemma 2's attention overwrites it; strides as those of x, because kernels depend on them.
    product = torch.empty_like(x)
    pairs, out = (torch.view_as_complex(t.reshape(*x.shape[:-1], -1, 2)) for t in (x, product))
    torch.mul(pairs, turn, out=out)
    return product
