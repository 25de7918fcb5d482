"""AdamW with 8-bit states whose blocks do not depend on how parameters are sharded.

Example: rows of a weight [8, 600] are cut into blocks of 256, 256 and 88 elements. Both moments have codes [8, 600] of
one byte and fp32 scales [8, 3]: 9,792 bytes instead of 38,400. A rank with 4 of the rows has 4 of the rows of codes and
scales, and makes the same update. Blocks of the flattened weight would begin anew with each shard: element 2,400, the
first of row 4, begins a block on the second of two ranks, and is inside of that from 2,304 to 2,559 on one.

Shapes: r rows (all dimensions but the last), c blocks per row, w width of a block.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torchao.optim.quant_utils import create_dynamic_map, quantize_8bit_with_qmap

from recipe_utils.compiler import configure_compiler
from recipe_utils.parallel.fsdp import local, sharded_as

_BLOCK = 256
"""Maximum number of elements that share a scale."""
_MIN_ELEMENTS = 4096
"""Smaller parameters have fp32 states, as in bitsandbytes; counted over all shards."""


class AdamW8bit(Optimizer):
    """AdamW with moments of 8 bits (https://arxiv.org/abs/2110.02861): 2.03 bytes per parameter.

    Blocks are parts of a row of the whole parameter, so any number of FSDP2's ranks makes the same
    update, and a checkpoint holds the states as plain tensors: codes of the parameter's shape and
    scales [r, c]. Vectors and small parameters have fp32 states.

    Arguments are those of ``torch.optim.AdamW``; with ``fused``, ``found_inf`` skips a step without a device
    synchronization. Raises ValueError if one is out of bounds, or (in a step) if a parameter is sharded within rows.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        fused: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        for name, value in options.items():
            is_valid = all(0 <= beta < 1 for beta in betas) if name == "betas" else value >= 0  # type: ignore[operator]
            if not is_valid:
                raise ValueError(f"optimizer.{name}={value}: it is out of bounds")
        super().__init__(params, {**options, "fused": fused})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one step; none on the device where ``found_inf`` is above 0."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= _new_state(p, group["fused"])
                # Tensors, because a compiled update has floats as constants.
                lr, decay = (torch.tensor(group[name]) for name in ("lr", "weight_decay"))
                shard, grad, step, *moments = (local(each).detach() for each in (p, p.grad, *state.values()))
                flat = shard.contiguous()
                update = _compiled() if shard.is_cuda and shard.numel() else _update
                tables = tuple(_table(is_signed, shard.device) for is_signed in (True, False))
                *others, last = _pieces(flat, grad.contiguous(), *moments)
                numbers = (lr, *group["betas"], group["eps"], decay)
                for counter, piece in (*((step.clone(), piece) for piece in others), (step, last)):
                    update(getattr(self, "found_inf", None), numbers, tables, counter, *piece)
                if flat is not shard:
                    shard.copy_(flat)


def _new_state(p: Tensor, is_fused: bool) -> dict[str, Tensor]:
    """Returns the state of a parameter before its first step, sharded as it is."""
    shard = local(p)
    state = {"step": torch.zeros((), device=shard.device if is_fused else "cpu")}
    if p.ndim < 2 or p.numel() < _MIN_ELEMENTS:
        like = torch.empty((), dtype=torch.promote_types(shard.dtype, torch.float32), device=shard.device)
        return state | {name: sharded_as(p, like.new_zeros(shard.shape)) for name in ("exp_avg", "exp_avg_sq")}
    if isinstance(p, DTensor) and any(isinstance(s, Shard) and s.dim % p.ndim == p.ndim - 1 for s in p.placements):
        raise ValueError("optimizer=AdamW8bit: a parameter is sharded within rows; set tensor_parallel_dim=1")
    for name, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
        # All elements have the same code, and all blocks the same scale.
        table = _table(is_signed, shard.device)
        code, scale = _quantized(torch.zeros_like(table[:1]), table)
        state[name] = sharded_as(p, code.expand(shard.shape).contiguous())
        num_blocks = math.ceil(shard.size(-1) / _BLOCK)
        state[f"{name}_scales"] = sharded_as(p, scale.expand(*shard.shape[:-1], num_blocks).contiguous())
    return state


@cache
def _table(is_signed: bool, device: torch.device) -> Tensor:
    """Returns the values of the 256 codes."""
    return torch.tensor(create_dynamic_map(signed=is_signed), dtype=torch.float32, device=device)


def _quantized(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales [..., 1] of blocks [..., w]; ``table`` are the codes' values [256]."""
    scales = values.abs().amax(-1, keepdim=True).clip(1e-12)
    return quantize_8bit_with_qmap(values / scales, table), scales


def _pieces(shard: Tensor, grad: Tensor, *moments: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields views of a shard, its gradient and its moments: [r, c, w] with scales [r, c, 1]; without codes [n].

    A piece has blocks of one width: of the width 600, pieces are [r, 2, 256] and [r, 1, 88]. (Padding the last
    block instead is compiled wrong on a CPU: torch 2.13, rows of 300.) Where all blocks are whole, each is a row,
    so that such parameters share a compiled update.
    """
    if len(moments) == 2 or shard.numel() == 0:  # a rank without rows counts the step only
        yield tuple(each.view(-1) for each in (shard, grad, *(moments if shard.numel() else (shard, shard))))
        return
    width = shard.size(-1) if shard.size(-1) % _BLOCK else _BLOCK
    num_whole, num_blocks = width // _BLOCK, math.ceil(width / _BLOCK)
    first, its_scales, second, their_scales = moments
    per_block = ((shard, _BLOCK), (grad, _BLOCK), (first, _BLOCK), (its_scales, 1), (second, _BLOCK), (their_scales, 1))
    for start, stop in ((0, num_whole), (num_whole, num_blocks)):
        if start < stop:
            yield tuple(
                each.view(-1, width if n > 1 else num_blocks)[:, start * n : stop * n].unflatten(-1, (stop - start, -1))
                for each, n in per_block
            )


def _update(
    found_inf: Tensor | None,
    numbers: Any,
    tables: Sequence[Tensor],
    step: Tensor,
    p: Tensor,
    grad: Tensor,
    *moments: Tensor,
) -> None:
    """Steps a parameter in place. ``moments`` are both, each with its scales if it is in codes."""
    # Moments of this step in fp32; codes exist between steps only.
    lr, beta1, beta2, eps, weight_decay = numbers
    has_codes = len(moments) == 4
    first, second = moments[:: len(moments) // 2]
    if has_codes:
        # The compiler has no index of one byte.
        first, second = tables[0][first.int()] * moments[1], tables[1][second.int()] * moments[3]
    gradient, value = grad.to(first.dtype), p.to(first.dtype)
    first = first.lerp(gradient, 1 - beta1)
    second = second.lerp(gradient.square(), 1 - beta2)

    # AdamW with corrections of the bias of the first steps (https://arxiv.org/abs/1711.05101, algorithm 2).
    count = step + 1
    root = (second / (1 - beta2**count)).sqrt() + eps
    stepped = value * (1 - lr * weight_decay) - lr / (1 - beta1**count) * first / root

    kept: tuple[Tensor, ...] = (first, second)
    if has_codes:
        codes, scales = _quantized(second, tables[1])
        # A second moment of 0 beside a first one that is none would be a huge step.
        codes = codes.clamp(min=1).where(second > 0, codes)
        kept = (*_quantized(first, tables[0]), codes, scales)
    # In place, and on the device where nothing changes if a gradient is not finite.
    for old, new in zip((step, p, *moments), (count, stepped, *kept), strict=True):
        new = new.to(old.dtype)
        old.copy_(new if found_inf is None else torch.where(found_inf.to(old.device) > 0, old, new))


@cache
def _compiled(backend: str = "inductor") -> Callable[..., None]:
    """Returns the compiled update, which recompiles for each kind of piece, not for each size."""
    configure_compiler()
    compiled = torch.compile(_update, fullgraph=True, dynamic=False, backend=backend)

    def update(found_inf: Tensor | None, numbers: Any, tables: Sequence[Tensor], step: Tensor, *piece: Tensor) -> None:
        for tensor in piece:
            for dim, size in enumerate(tensor.shape):
                if size > 1 and (dim != 2 or size != _BLOCK):
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
        with torch._dynamo.utils.disable_cache_limit():
            compiled(found_inf, numbers, tables, step, *piece)

    return update
