"""Adapters of a frozen base model: LoRA, DoRA, and both over NF4 weights.

Models with adapters train nothing else. With base weight W [o, i], A [r, i] and B [o, r], an
adapted layer multiplies with W + (alpha / r) B A (LoRA, Hu et al. 2021), or with that, its rows
rescaled to the norms ``magnitude`` [o] (DoRA, Liu et al. 2024).
"""

import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import to_nf4
from torchtune.modules.peft import DoRALinear, LoRALinear, get_adapter_params, set_trainable_params

from recipe_utils.checkpoint.tensors import describe_mismatch
from recipe_utils.models.adapters.nf4 import SCALER_BLOCK_SIZE, is_quantized

_NUM_SAMPLED = 64


@dataclass(frozen=True)
class Adapter:
    """Adapter of one weight [o, i]."""

    rank: int
    alpha: float
    has_magnitude: bool
    """True for DoRA."""
    dropout: float


@dataclass(frozen=True)
class Adapters:
    """Adapters, and trained and frozen parameters, of a whole model."""

    modules: Mapping[str, Adapter]
    """Adapters by the name of the adapted module."""
    trained: frozenset[str]
    """Names of parameters."""
    frozen: Mapping[str, int]
    """Names of the other parameters; ``scaler_block_size`` of those in NF4, 0 of plain ones."""


def freeze_base(model: nn.Module) -> None:
    """Freezes all parameters but adapters, if the model has any; call it before the model is cut or wrapped.

    Raises ValueError for an adapter that cannot learn, because of its rank, alpha or dropout.
    """
    parameters = get_adapter_params(model)
    if not parameters:
        return
    set_trainable_params(model, parameters)
    for adapter in find_adapters(model).modules.values():
        check_adapter("lora_rank", adapter.rank, adapter.alpha, adapter.dropout)


def check_adapter(rank_key: str, rank: int, alpha: float, dropout: float) -> None:
    """Raises ValueError if an adapter cannot learn; ``rank_key`` is the rank's config key."""
    for key, value, trains, instead in (
        (rank_key, rank, rank >= 1, "at least 1"),
        ("lora_alpha", alpha, alpha > 0, "above 0"),
        ("lora_dropout", dropout, 0 <= dropout < 1, "at least 0 and below 1"),
    ):
        if not trains:
            raise ValueError(f"model.{key}={value}: no adapter can be trained so; set it to {instead}")


def find_adapters(model: nn.Module) -> Adapters:
    """Returns the adapters of a model, wrapped and sharded or not, by the names of its state dict.

    Adapters other than torchtune's LoRA and DoRA are trained, but are not an :class:`Adapter`.
    """
    # Names of the state dict, which lack those of wrappers such as activation checkpointing's.
    parameters = model.state_dict(keep_vars=True)
    names = {id(parameter): name for name, parameter in parameters.items()}
    modules, scaler_block_sizes = {}, {}
    for module in model.modules():
        if isinstance(module, (LoRALinear, DoRALinear)):
            rank, is_dora = module.lora_a.out_features, isinstance(module, DoRALinear)
            alpha = module.scaling * rank if is_dora else module.alpha
            adapter = Adapter(rank, alpha, is_dora, getattr(module.dropout, "p", 0.0))
            modules[names[id(module.weight)].removesuffix(".weight")] = adapter
        if is_quantized(module):
            size = getattr(module, "scaler_block_size", None) or SCALER_BLOCK_SIZE
            scaler_block_sizes[names[id(module.weight)]] = size
    trained = frozenset(name for name, p in parameters.items() if p.requires_grad)
    frozen = {
        name: scaler_block_sizes.get(name, 0)
        for name, p in parameters.items()
        if isinstance(p, nn.Parameter) and not p.requires_grad
    }
    return Adapters(modules, trained, frozen)


def adapters_in_words(model: nn.Module, adapters: Adapters) -> str:
    """Returns the number and names of a model's adapted modules, and the part of its experts that has adapters."""
    num_experts = dict[str, int]()
    for name, parameter in model.named_parameters():
        if prefix := re.match(r".*\bexperts\.(\d+\.)?", name):  # one, or all of a layer
            num_experts[prefix[0]] = 1 if prefix[1] else len(parameter)
    adapted = [prefix for prefix in num_experts if any(n.startswith(prefix) for n in adapters.modules)]
    names = ", ".join(sorted({name.rpartition(".")[2] for name in adapters.modules}))
    text = f"; of {len(adapted)} of {sum(num_experts.values())} experts" if num_experts else ""
    return f"{len(adapters.modules)} modules: {names}{text}"


def initial_adapters(
    adapters: Adapters, base: Mapping[str, Tensor], given: Mapping[str, Tensor] | None, seed: int, dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """Returns the initial adapters: those of ``checkpointer.adapter_checkpoint``, or fresh ones.

    ``base`` and ``given`` are full (unsharded), on every rank; ``dtype`` is that of matrix products with the base.
    Raises ValueError if given adapters are of another rank or of other modules, or none are given for adapters other
    than LoRA and DoRA.
    """
    # Trained weights that are neither LoRA's nor the base's, such as another library's adapters, have no fresh values.
    fresh = fresh_adapters(adapters, base, seed, dtype)
    unknown = sorted(adapters.trained - fresh.keys() - base.keys()) if adapters.modules else []
    if given is None:
        if unknown:
            raise ValueError(
                f"checkpointer.adapter_checkpoint: {unknown[0]} is no LoRA or DoRA, so it has no values to "
                "start from; set it to a file that has them"
            )
        return fresh
    # Given adapters must have the names and shapes of fresh ones; those of unknown kinds may have any shape.
    expected = {**fresh, **{name: given.get(name, torch.empty(0)) for name in unknown}}
    problem = describe_mismatch(given, expected, compares_dtypes=False)
    if problem:
        raise ValueError(
            f"checkpointer.adapter_checkpoint: {problem}; set rank and adapted modules of model as they were trained"
        )
    return given


def fresh_adapters(adapters: Adapters, base: Mapping[str, Tensor], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns full adapters that leave outputs unchanged: A as in torchtune, B zero, magnitudes the row norms of W.

    Each A has its own generator, so that it does not depend on the layout of ranks and stages. All
    are in fp32 but the magnitudes [o].

    ``base`` is full (unsharded), on every rank. NF4 and DoRA's magnitudes depend on ``dtype``, that
    of matrix products with the base.
    """
    fresh: dict[str, Tensor] = {}
    for name, adapter in adapters.modules.items():
        weight = base.get(f"{name}.weight")
        if weight is None:
            continue  # reported by load_weights
        num_out, num_in = weight.shape
        a = torch.empty(adapter.rank, num_in, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
        fresh[f"{name}.lora_a.weight"] = nn.init.kaiming_uniform_(a, math.sqrt(5), generator=generator)
        fresh[f"{name}.lora_b.weight"] = torch.zeros(num_out, adapter.rank, dtype=torch.float32)
        if adapter.has_magnitude:
            multiplied = weight.to(dtype)
            if size := adapters.frozen.get(f"{name}.weight"):
                multiplied = to_nf4(multiplied, scaler_block_size=size).to(dtype)
            fresh[f"{name}.magnitude"] = torch.linalg.norm(multiplied, dim=1)
    return fresh


def check_origin(adapters: Adapters, fingerprints: Mapping[str, str], described: Mapping[str, Any]) -> None:
    """Raises ValueError if given adapters were trained with another alpha or base.

    ``fingerprints`` are those of the base; ``described`` is what
    :func:`recipe_utils.checkpoint.peft.load_checkpoint` found beside the adapters.
    """
    key, alpha = "checkpointer.adapter_checkpoint", described.get("lora_alpha")
    alphas = {adapter.alpha for adapter in adapters.modules.values()}
    if alpha is not None and alphas and alphas != {alpha}:
        raise ValueError(
            f"{key}: its adapters were trained with lora_alpha={alpha:g}, the model has {min(alphas):g}; set "
            f"model.lora_alpha={alpha:g}"
        )
    then = described.get("frozen", {})
    others = [name for name in then if name in fingerprints and _plain(then[name]) != _plain(fingerprints[name])]
    if others:
        raise ValueError(
            f"{key}: its adapters were trained on another base: {len(others)} of {len(then)} weights differ "
            f"({others[0]}, ...); set checkpointer to that base, or, for a merged model, adapter_checkpoint=null"
        )


def _plain(fingerprint: str) -> str:
    return fingerprint.removesuffix(" NF4")  # adapters of a quantized base fit the plain one


def fingerprint_of_frozen(adapters: Adapters, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns a fingerprint of each frozen weight: shape, CRC-32 of some elements, and NF4.

    ``weights`` are full (unsharded), as read by the checkpointer.
    """
    fingerprints = {}
    for name, is_nf4 in adapters.frozen.items():
        if name in weights:
            weight = weights[name]
            sample = weight.flatten()[:: max(weight.numel() // _NUM_SAMPLED, 1)]
            crc32 = zlib.crc32(sample.contiguous().view(torch.uint8).numpy().tobytes())
            shape = "x".join(map(str, weight.shape))
            fingerprints[name] = f"{shape} {crc32:08x}" + (" NF4" if is_nf4 else "")
    return fingerprints
