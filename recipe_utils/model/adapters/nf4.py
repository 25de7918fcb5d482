"""Frozen NF4 weights (QLoRA, Dettmers et al. 2023): built plain, quantized when loaded, upcast one at a time."""

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

_UPCAST_HOOKS = (
    reparametrize_as_dtype_state_dict_post_hook,
    _low_ram_reparametrize_as_dtype_state_dict_post_hook,
)
NF4_ELEMENTS = 64 * 256
"""Elements of a whole NF4 block: 64 elements share a factor, 256 factors share another."""


def is_quantised(module: nn.Module) -> bool:
    """Returns True if a module's ``weight`` is, or will be, in NF4."""
    return isinstance(module, FrozenNF4Linear) or bool(getattr(module, "_quantize_base", False))


@contextmanager
def without_quantising() -> Iterator[None]:
    """Makes builders keep weights plain that they would quantize to NF4.

    NF4 tensors are not fully implemented on the meta device.
    :func:`recipe_utils.model.build.weights.load_weights` quantizes the loaded weights.
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


def drop_upcast_hooks(model: nn.Module) -> None:
    """Removes the hooks with which a QLoRA builder upcasts all NF4 weights at each ``state_dict()``."""
    for key, hook in list(model._state_dict_hooks.items()):
        if getattr(hook, "func", None) in _UPCAST_HOOKS:
            del model._state_dict_hooks[key]


def check_nf4(model: nn.Module, frozen: Mapping[str, bool], num_shards: int | None) -> None:
    """Checks that NF4 weights divide into whole blocks, and that FSDP2 can gather them.

    ``frozen`` is True for weights in NF4. FSDP2 splits rows over ``num_shards`` ranks; None without
    FSDP2.

    Raises:
        ValueError: parts that are not whole blocks, or a single part, which FSDP2 would treat as a
            plain tensor.
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
