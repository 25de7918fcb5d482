"""Frozen weights in NF4 (QLoRA, Dettmers et al. 2023): built plain, quantised when loaded, widened one at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchao.dtypes.nf4tensor import to_nf4
from torchtune.modules.common_utils import (
    _low_ram_reparametrize_as_dtype_state_dict_post_hook,
    reparametrize_as_dtype_state_dict_post_hook,
)
from torchtune.modules.low_precision import FrozenNF4Linear, nf4_linear
from torchtune.modules.peft import dora, lora

_WIDENING_HOOKS = (
    reparametrize_as_dtype_state_dict_post_hook,
    _low_ram_reparametrize_as_dtype_state_dict_post_hook,
)
NF4_ELEMENTS = 64 * 256
"""Whole blocks of NF4: 64 elements share a factor, 256 factors another."""


def is_quantised(module: nn.Module) -> bool:
    """Whether a module's ``weight`` is, or will be, kept in NF4."""
    return isinstance(module, FrozenNF4Linear) or bool(getattr(module, "_quantize_base", False))


@contextmanager
def without_quantising() -> Iterator[None]:
    """Inside, builders leave plain the weights that they would make NF4.

    There is nothing to quantise on the meta device, and NF4 tensors are not implemented there in full.
    :func:`recipe_utils.model.build.weights.load_weights` quantises what it loads.
    """

    def plain(weight: Tensor, **block_sizes: int) -> Tensor:
        if block_sizes:
            raise ValueError(
                f"NF4 with {block_sizes}: only torchtune's default blocks can be sharded"
            )
        return weight

    users: list[Any] = [lora, dora, nf4_linear]
    for user in users:
        user.to_nf4 = plain
    try:
        yield
    finally:
        for user in users:
            user.to_nf4 = to_nf4


def drop_widening_hooks(model: nn.Module) -> None:
    """Takes away what a QLoRA builder added to widen all NF4 weights at once whenever their names are asked for."""
    for key, hook in list(model._state_dict_hooks.items()):
        if getattr(hook, "func", None) in _WIDENING_HOOKS:
            del model._state_dict_hooks[key]


def check_nf4(model: nn.Module, frozen: Mapping[str, bool], num_shards: int | None) -> None:
    """Refuses to make NF4 what does not fall into its blocks, or what FSDP2 could not put together again.

    Args:
        model: not sharded yet.
        frozen: names of weights; whether they are to be NF4.
        num_shards: ranks that FSDP2 cuts each weight's rows over; None where it is not used.

    Raises:
        ValueError: parts that are not whole blocks, or a single one, which FSDP2 hands on as if it were
            plain.
    """
    if num_shards == 1 and any(frozen.values()):
        raise ValueError(
            "data_parallel_shard_dim=1: FSDP2 cannot keep NF4 weights (model.quantize_base=True) whole on "
            "each rank; set it to 2 or more"
        )
    for name, weight in model.state_dict().items():
        if not frozen.get(name):
            continue
        num_parts = num_shards or 1
        if len(weight) % num_parts or weight.numel() % (num_parts * NF4_ELEMENTS):
            raise ValueError(
                f"model.quantize_base=True: {name} {tuple(weight.shape)} on {num_parts} ranks: NF4 needs "
                f"equally many rows on each and a multiple of {NF4_ELEMENTS} elements; set it to False, or "
                "data_parallel_shard_dim to a divisor"
            )
