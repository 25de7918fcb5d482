"""Adapters beside a frozen base, as a model's builder gave them: LoRA, DoRA, and both over NF4 weights.

A model with adapters trains its adapters and nothing else. With a base weight W [o, i], A [r, i] and B [o, r]
an adapted layer multiplies with W + (alpha / r) B A (LoRA, Hu et al. 2021), or with the rows of that brought
to the length ``magnitude`` [o] (DoRA, Liu et al. 2024). NF4 is QLoRA's (Dettmers et al. 2023).
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer
from torchao.dtypes.nf4tensor import linear_nf4, to_nf4
from torchao.quantization.qat import FakeQuantizerBase
from torchtune import config, training
from torchtune.modules.common_utils import (
    _low_ram_reparametrize_as_dtype_state_dict_post_hook,
    reparametrize_as_dtype_state_dict_post_hook,
)
from torchtune.modules.low_precision import FrozenNF4Linear, nf4_linear
from torchtune.modules.peft import (
    DoRALinear,
    LoRALinear,
    dora,
    get_adapter_params,
    lora,
    set_trainable_params,
)
from torchtune.training.quantization import get_quantizer_mode

from recipe_utils.optim.optimizer import OptimizerInBackward, single_optimizers
from recipe_utils.settings import ConfigError

WIDENING_HOOKS = (
    reparametrize_as_dtype_state_dict_post_hook,
    _low_ram_reparametrize_as_dtype_state_dict_post_hook,
)
NF4_ELEMENTS = 64 * 256
"""Whole blocks of NF4: 64 elements share a factor, 256 factors another."""
_NUM_SAMPLED = 64


@dataclass(frozen=True)
class Adapter:
    """What was added to one weight [o, i]."""

    rank: int
    alpha: float
    has_magnitude: bool
    """DoRA."""
    dropout: float


@dataclass(frozen=True)
class Adapters:
    """What of a whole model is trained and what is not; without adapters usually everything is."""

    modules: Mapping[str, Adapter]
    """By the name of the adapted module."""
    trained: frozenset[str]
    """Names of parameters."""
    frozen: Mapping[str, bool]
    """Names of the other parameters; whether they are kept in NF4."""


# ---- Before weights are loaded --------------------------------------------------------------------


@contextmanager
def without_quantising() -> Iterator[None]:
    """Inside, builders leave plain the weights that they would make NF4.

    There is nothing to quantise on the meta device, and NF4 tensors are not implemented there in full.
    :func:`recipe_utils.model.weights.load_weights` quantises what it loads.
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


def freeze_base(model: nn.Module) -> None:
    """Leaves only the adapters to be trained, if the model has any.

    Args:
        model: as its builder made it, before it is cut, wrapped and sharded.

    Raises:
        ValueError: an adapter of rank 0.
    """
    parameters = get_adapter_params(model)
    if not parameters:
        return
    set_trainable_params(model, parameters)
    for name, adapter in find_adapters(model).modules.items():
        if adapter.rank < 1:
            raise ValueError(
                f"model.lora_rank={adapter.rank}: {name} has nothing to train; set it to at least 1"
            )
    # A QLoRA builder's hook would widen all NF4 weights at once whenever names are asked for.
    for key, hook in list(model._state_dict_hooks.items()):
        if getattr(hook, "func", None) in WIDENING_HOOKS:
            del model._state_dict_hooks[key]


def simulate_quantisation(model: nn.Module, quantizer: Mapping[str, Any]) -> None:
    """Makes LoRA's base weights, and what they multiply, as coarse as a quantised model's will be, in place.

    As torchtune's ``QATLoRALinear``, which torchao 0.15 no longer runs.

    Args:
        model: with LoRA, on the meta device.
        quantizer: component of one of torchtune's quantizers for training (QAT).

    Raises:
        recipe_utils.settings.ConfigError: a model without LoRA, or with a base that is quantised
            already; a quantizer that cannot be trained with or whose groups do not divide a weight.
    """
    path = quantizer["_component_"]
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    if not layers:
        raise ConfigError(
            f"quantizer={path}: it is for LoRA, of which this model has none; take it out, or set model to "
            "a lora_ builder without use_dora"
        )
    if any(is_quantised(module) for module in model.modules()):
        raise ConfigError(
            f"quantizer={path}: model.quantize_base=True keeps NF4 weights; set one of the two to null or False"
        )
    made = config.instantiate(OmegaConf.create(dict(quantizer)))
    if "qat" not in (get_quantizer_mode(made) or ""):
        raise ConfigError(
            f"quantizer={path}: it cannot be trained with; set "
            "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
        )
    made.precision = torch.get_default_dtype()
    of_inputs = made.get_activation_fake_quantize_config()
    of_weights = made.get_weight_fake_quantize_config()
    for layer in layers:
        if of_weights is not None and layer.in_dim % of_weights.group_size:
            raise ConfigError(
                f"quantizer.groupsize={of_weights.group_size}: it does not divide {layer.in_dim}, a layer's "
                "width; set a divisor"
            )
        layer.activation_fake_quantizer = _fake_quantizer(of_inputs)
        layer.weight_fake_quantizer = _fake_quantizer(of_weights)
        layer.forward = MethodType(_forward_made_coarse, layer)


def _fake_quantizer(fake_quantize_config: Any) -> nn.Module:
    if fake_quantize_config is None:
        return nn.Identity()
    return FakeQuantizerBase.from_config(fake_quantize_config)


def _forward_made_coarse(layer: Any, x: Tensor) -> Tensor:
    """[..., i] -> [..., o]."""
    weight = layer.weight_fake_quantizer(layer.weight)
    base = F.linear(layer.activation_fake_quantizer(x), weight, layer.bias)
    if layer.disabled:
        return base
    return base + layer.alpha / layer.rank * layer.lora_b(layer.lora_a(layer.dropout(x)))


def is_quantised(module: nn.Module) -> bool:
    """Whether a module's ``weight`` is, or will be, kept in NF4."""
    return isinstance(module, FrozenNF4Linear) or bool(getattr(module, "_quantize_base", False))


def check_nf4(model: nn.Module, adapters: Adapters, num_shards: int | None) -> None:
    """Refuses to make NF4 what does not fall into its blocks, or what FSDP2 could not put together again.

    Args:
        model: not sharded yet.
        adapters: of the model.
        num_shards: ranks that FSDP2 cuts each weight's rows over; None where it is not used.

    Raises:
        ValueError: parts that are not whole blocks, or a single one, which FSDP2 hands on as if it were
            plain.
    """
    if num_shards == 1 and any(adapters.frozen.values()):
        raise ValueError(
            "data_parallel_shard_dim=1: FSDP2 cannot keep NF4 weights (model.quantize_base=True) whole on "
            "each rank; set it to 2 or more"
        )
    for name, weight in model.state_dict().items():
        if not adapters.frozen.get(name):
            continue
        num_parts = num_shards or 1
        if len(weight) % num_parts or weight.numel() % (num_parts * NF4_ELEMENTS):
            raise ValueError(
                f"model.quantize_base=True: {name} {tuple(weight.shape)} on {num_parts} ranks: NF4 needs "
                f"equally many rows on each and a multiple of {NF4_ELEMENTS} elements; set it to False, or "
                "data_parallel_shard_dim to a divisor"
            )


def find_adapters(model: nn.Module) -> Adapters:
    """Looks at a whole model's modules, wrapped and sharded or not; names are those of its state dict.

    Adapters of any other kind than torchtune's LoRA and DoRA are trained, but are no :class:`Adapter`.
    """
    parameters = model.state_dict(keep_vars=True)
    names = {id(parameter): name for name, parameter in parameters.items()}
    modules, quantised = {}, set()
    for module in model.modules():
        if isinstance(module, (LoRALinear, DoRALinear)):
            modules[names[id(module.weight)].removesuffix(".weight")] = _describe(module)
        if is_quantised(module):
            quantised.add(names[id(module.weight)])
    trained = frozenset(name for name, p in parameters.items() if p.requires_grad)
    frozen = {
        name: name in quantised
        for name, p in parameters.items()
        if isinstance(p, nn.Parameter) and not p.requires_grad
    }
    return Adapters(modules, trained, frozen)


def _describe(module: Any) -> Adapter:
    rank = module.lora_a.out_features
    is_dora = isinstance(module, DoRALinear)
    alpha = module.scaling * rank if is_dora else module.alpha
    return Adapter(rank, alpha, is_dora, getattr(module.dropout, "p", 0.0))


# ---- Weights ----------------------------------------------------------------------------------------


def initial_adapters(
    adapters: Adapters,
    base: Mapping[str, Tensor],
    given: Mapping[str, Tensor] | None,
    seed: int,
    dtype: torch.dtype,
) -> Mapping[str, Tensor]:
    """The adapters to start from: those of ``checkpointer.adapter_checkpoint``, or fresh ones.

    Args:
        adapters: of the whole model.
        base: its other weights, full (unsharded), on every rank.
        given: full, by name; None for :func:`fresh_adapters`.
        seed: of the run.
        dtype: that the base is multiplied in.

    Raises:
        ValueError: given ones of another rank or of other modules, or none given where there are
            adapters of a kind that this module knows no initial values of.
    """
    fresh = fresh_adapters(adapters, base, seed, dtype)
    unknown = sorted(adapters.trained - fresh.keys() - base.keys()) if adapters.modules else []
    if given is None:
        if unknown:
            raise ValueError(
                f"checkpointer.adapter_checkpoint: {unknown[0]} is no LoRA or DoRA, so it has no values to "
                "start from; set it to a file that has them"
            )
        return fresh
    wanted = fresh.keys() | set(unknown)
    shapes = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in fresh.items()
        if name in given and given[name].shape != tensor.shape
    ]
    for what, names in (
        ("lacks", wanted - given.keys()),
        ("has what the model has not:", given.keys() - wanted),
        ("has adapters of another rank or size:", shapes),
    ):
        if names:
            raise ValueError(
                f"checkpointer.adapter_checkpoint: it {what} {', '.join(sorted(names)[:3])} "
                f"({len(names)} in all); set model.lora_rank and the adapted modules as they were trained"
            )
    return given


def fresh_adapters(
    adapters: Adapters, base: Mapping[str, Tensor], seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Adapters that leave the model as it is: A drawn as torchtune draws it, B zero, magnitudes those of W.

    Each A has a generator of its own, so that it is the same on any layout of ranks and stages.

    Args:
        adapters: of the whole model.
        base: its other weights, full (unsharded), on every rank.
        seed: of the run.
        dtype: that the base is multiplied in, which NF4 and DoRA's magnitudes depend on.

    Returns:
        Full tensors by name, in fp32 but for magnitudes [o].
    """
    fresh: dict[str, Tensor] = {}
    for name, adapter in adapters.modules.items():
        weight = base.get(f"{name}.weight")
        if weight is None:
            continue  # load_weights says so
        num_out, num_in = weight.shape
        a = torch.empty(adapter.rank, num_in, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
        fresh[f"{name}.lora_a.weight"] = nn.init.kaiming_uniform_(
            a, math.sqrt(5), generator=generator
        )
        fresh[f"{name}.lora_b.weight"] = torch.zeros(num_out, adapter.rank, dtype=torch.float32)
        if adapter.has_magnitude:
            multiplied = weight.to(dtype)
            if adapters.frozen.get(f"{name}.weight"):
                multiplied = to_nf4(multiplied).to(dtype)
            fresh[f"{name}.magnitude"] = torch.linalg.norm(multiplied, dim=1)
    return fresh


def fingerprint_of_frozen(adapters: Adapters, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """What tells one base from another: shape, some elements' CRC-32, and NF4, of each frozen weight.

    Args:
        adapters: of the whole model.
        weights: full (unsharded), as the checkpointer has read them.
    """
    found = {}
    for name, is_nf4 in adapters.frozen.items():
        if name in weights:
            weight = weights[name]
            sample = weight.flatten()[:: max(weight.numel() // _NUM_SAMPLED, 1)]
            crc32 = zlib.crc32(sample.contiguous().view(torch.uint8).numpy().tobytes())
            shape = "x".join(map(str, weight.shape))
            found[name] = f"{shape} {crc32:08x}" + (" NF4" if is_nf4 else "")
    return found


def contents_of_export(
    weights: dict[str, Tensor], adapters: Adapters, dtype: torch.dtype | None
) -> tuple[dict[str, Any], float]:
    """What torchtune's checkpointers save: the merged model if all weights are there, and the adapters.

    Args:
        weights: full (unsharded), of the whole model or only its adapters; they are merged in place.
        adapters: of the model.
        dtype: of the model's weights; None leaves each its own.

    Returns:
        By torchtune's keys; and the part of the adapters' change that is lost by rounding.
    """
    contents: dict[str, Any] = {}
    lost = 0.0
    if adapters.modules:
        trained = {name: weights.pop(name) for name in sorted(adapters.trained) if name in weights}
        contents[training.ADAPTER_KEY] = trained
        contents[training.ADAPTER_CONFIG] = _adapter_config(adapters)
        if weights:
            lost = merge(weights, trained, adapters, dtype)
    if weights:
        contents[training.MODEL_KEY] = {
            name: weight.to(dtype) if dtype and weight.is_floating_point() else weight
            for name, weight in weights.items()
        }
    return contents, lost


def _adapter_config(adapters: Adapters) -> dict[str, Any]:
    """PEFT's ``adapter_config.json``, with torchtune's module names."""
    described = list(adapters.modules.values())
    first = described[0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "use_dora": first.has_magnitude,
        "bias": "none",
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in adapters.modules}),
    }


def merge(
    weights: dict[str, Tensor],
    trained: Mapping[str, Tensor],
    adapters: Adapters,
    dtype: torch.dtype | None = None,
) -> float:
    """Puts adapters into the weights that they adapt, in place. Computed in at least fp32, rounded once.

    Args:
        weights: of the base, full (unsharded).
        trained: the adapters, likewise.
        adapters: what they are.
        dtype: of the merged weights; None leaves each its own.

    Returns:
        The part of the change that is lost by rounding: |merged - exact| / |exact - base|, over all of
        them (Frobenius norms).
    """
    lost, changed = 0.0, 0.0
    for name, adapter in adapters.modules.items():
        base = weights[f"{name}.weight"]
        wide = torch.promote_types(base.dtype, torch.float32)
        a, b = (trained[f"{name}.lora_{part}.weight"].to(wide) for part in "ab")
        exact = base.to(wide) + (adapter.alpha / adapter.rank) * (b @ a)
        if adapter.has_magnitude:
            magnitude = trained[f"{name}.magnitude"].to(wide)
            exact *= (magnitude / torch.linalg.norm(exact, dim=1)).unsqueeze(1)
        merged = exact.to(dtype or base.dtype)
        lost += float((merged.to(wide) - exact).square().sum())
        changed += float((exact - base.to(wide)).square().sum())
        weights[f"{name}.weight"] = merged
    return math.sqrt(lost / changed) if changed else 0.0


# ---- DoRA's norms -----------------------------------------------------------------------------------


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
