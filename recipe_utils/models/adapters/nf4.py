"""Frozen NF4 weights (QLoRA, Dettmers et al. 2023): built plain, quantized when loaded, upcast one at a time.

Example: a weight [4096, 4096] has 16.8M elements of 4 bits, in blocks of 64 with an 8-bit factor each; 256 such factors
share an fp32 factor and all of them one mean: 8.66 MB instead of 33.6 MB in bf16. On 8 ranks each has 512 rows, which
are 128 whole blocks of 64 x 256 elements. Quantized rank by rank the mean would be that of a part, so every rank
quantizes the whole weight and keeps its rows.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchtune.modules.common_utils import (
    _low_ram_reparametrize_as_dtype_state_dict_post_hook,
    reparametrize_as_dtype_state_dict_post_hook,
)
from torchtune.modules.low_precision import FrozenNF4Linear, nf4_linear
from torchtune.modules.peft import DoRALinear, LoRALinear, dora, lora

_UPCAST_HOOKS = (reparametrize_as_dtype_state_dict_post_hook, _low_ram_reparametrize_as_dtype_state_dict_post_hook)
_BLOCK_SIZE, SCALER_BLOCK_SIZE = 64, 256
"""64 elements share a factor, and by default 256 factors share another."""


def is_quantized(module: nn.Module) -> bool:
    """Returns True if a module's ``weight`` is, or will be, in NF4."""
    return isinstance(module, FrozenNF4Linear) or bool(getattr(module, "_quantize_base", False))


@contextmanager
def without_quantizing() -> Iterator[None]:
    """Makes builders keep weights plain that they would quantize to NF4.

    NF4 tensors are not fully implemented on the meta device. :func:`recipe_utils.models.weights.load_weights` quantizes
    the loaded weights, with the ``scaler_block_size`` that layers are built with (200 in Llama 3.2 Vision's encoders).
    """

    def plain(weight: Tensor, **options: int) -> Tensor:
        if options:
            raise ValueError(f"NF4 with {options}: only scaler_block_size can be changed")
        return weight

    def remembering(init: Any) -> Any:
        def remember(self: Any, *args: Any, scaler_block_size: int | None = None, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.scaler_block_size = scaler_block_size

        return remember

    # The builders import to_nf4 by name, and do not keep the block size that they are called with.
    modules: list[Any] = [lora, dora, nf4_linear]
    layers: list[Any] = [LoRALinear, DoRALinear, FrozenNF4Linear]
    patched = [(module, "to_nf4", plain) for module in modules]
    patched += [(layer, "__init__", remembering(layer.__init__)) for layer in layers]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    for patch in patched:
        setattr(*patch)
    try:
        yield
    finally:
        for original in originals:
            setattr(*original)


def drop_upcast_hooks(model: nn.Module) -> None:
    """Removes the hooks with which a QLoRA builder upcasts all NF4 weights at each ``state_dict()``."""
    for key, hook in list(model._state_dict_hooks.items()):
        if getattr(hook, "func", None) in _UPCAST_HOOKS:
            del model._state_dict_hooks[key]


def check_nf4(model: nn.Module, frozen: Mapping[str, int], num_shards: int | None) -> None:
    """Checks that NF4 weights divide into whole blocks, and that FSDP2 can gather them.

    ``frozen`` is the ``scaler_block_size`` of weights in NF4, 0 of others. FSDP2 splits rows over
    ``num_shards`` ranks; None without FSDP2. Raises ValueError for parts that are not whole blocks, and for a single
    part, which FSDP2 would treat as a plain tensor.
    """
    if num_shards == 1 and any(frozen.values()):
        raise ValueError(
            "data_parallel_shard_dim=1: FSDP2 cannot keep NF4 weights (model.quantize_base=True) whole on "
            "each rank; set it to 2 or more"
        )
    for name, weight in model.state_dict().items():
        if not frozen.get(name):
            continue
        # A part of rows is quantized in blocks, whose scales are quantized in blocks again.
        num_parts, num_elements = num_shards or 1, _BLOCK_SIZE * frozen[name]
        if len(weight) % num_parts or weight.numel() % (num_parts * num_elements):
            raise ValueError(
                f"model.quantize_base=True: {name} {tuple(weight.shape)} on {num_parts} ranks: NF4 needs "
                f"equally many rows on each and a multiple of {num_elements} elements; set it to False, or "
                "data_parallel_shard_dim to a divisor"
            )
