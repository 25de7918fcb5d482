"""LoRA and DoRA in decoders of transformers: torchtune's layers in place of the linear ones."""

import inspect
import re
from functools import cache
from itertools import chain
from typing import Any

from torch import nn
from torchtune.modules.peft import DoRALinear, LoRALinear
from transformers import PreTrainedModel

from recipe_utils.checkpoint.transformers import names_of_weights
from recipe_utils.models.adapters.lora import check_adapter
from recipe_utils.models.transformers.causal_lm import best_plan, decoder_of
from recipe_utils.models.transformers.decoder import Decoder
from recipe_utils.settings.components import DEFAULTS_OF_MODELS
from recipe_utils.torchtune_names import log_once

_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names that linear layers of experts had before transformers fused them."""


def lora_causal_lm(
    path: str,
    r: int = 8,
    lora_alpha: float = 8,
    target_modules: str | list[str] = "all-linear",
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    use_rslora: bool = False,
    attention: str | None = None,
    config: dict[str, Any] | None = None,
    images: bool = False,
) -> Decoder:
    """Returns the decoder of :func:`causal_lm`, with adapters. Arguments are named as in PEFT's ``LoraConfig``.

    Args:
        path: local folder in the format of transformers; never a name on the hub.
        r: rank of the adapters.
        lora_alpha: the adapters' products are multiplied with ``lora_alpha / r``.
        target_modules: names of layers, or the last parts of names; ``all-linear``: all ``nn.Linear``
            but the output layer, without experts that are one parameter. Only layers that text passes through.
        lora_dropout: probability with which a channel of an adapter's input is zeroed.
        use_dora: rescales the rows of adapted weights to trained norms.
        use_rslora: multiplies with ``lora_alpha / sqrt(r)`` instead.
        attention: attention of transformers, see :func:`causal_lm`.
        config: architecture to train from fresh weights, see :func:`causal_lm`.
        images: takes images beside text; adapters are in the text alone.

    Raises:
        ValueError: adapters that cannot be trained, or a layer that cannot have them; and what
            :func:`causal_lm` raises.
    """
    check_adapter("r", r, lora_alpha, lora_dropout)
    alpha = lora_alpha * r**0.5 if use_rslora else lora_alpha

    def adapt(model: PreTrainedModel) -> None:
        for name, linear in _targets(model, target_modules).items():
            sizes = (linear.in_features, linear.out_features, r, alpha, lora_dropout)
            adapted = (DoRALinear if use_dora else LoRALinear)(*sizes, linear.bias is not None)
            adapted.weight, adapted.bias = linear.weight, linear.bias
            model.set_submodule(name, adapted)

    # An adapted model computes what its base does with other weights, so the base's check is its own, too.
    return decoder_of(path, attention, config, adapt, images)


DEFAULTS_OF_MODELS[lora_causal_lm] = {"microbatching": best_plan}


def _targets(model: PreTrainedModel, targets: str | list[str]) -> dict[str, nn.Linear]:
    """Returns the layers to adapt by name. Raises ValueError for one that cannot be adapted."""
    modules: dict[str, Any] = dict(model.named_modules())
    frozen = [name for name, m in modules.items() if _is_linear(m) and not m.weight.requires_grad]  # not for text
    reached = [name for name in modules if name not in frozen]
    linear = [name for name in reached if _is_linear(modules[name])]
    names_of = {
        target: [name for name in reached if f".{name}".endswith(f".{target}")]
        for target in ([targets] if isinstance(targets, str) else targets)
    }
    if targets == "all-linear":
        output = model.get_output_embeddings()
        names_of = {targets: [name for name in linear if modules[name] is not output]}
    targeted = list(chain(*names_of.values()))

    # An adapter beside a weight that is shared, or that its parent reads, would have no or half an effect.
    ties = [[first, *others] for first, others in names_of_weights(model).items() if others]
    tied = {name.rpartition(".")[0] for name in chain(*ties)}
    refused = {name: _refusal(modules, tied, name) for name in {*linear, *targeted}}
    problems = [f"{target} fits no layer" for target, names in names_of.items() if not names]
    problems += {refused[name]: None for name in targeted if refused[name]}  # each once
    if problems or not names_of:
        others = {_last(name) for name in refused if refused[name]}
        names = sorted({*map(_last, linear)} - others)
        which = f"set it to some of [{', '.join(names)}]" if names else "no nn.Linear can have them"
        text = "; ".join(problems[:5]) or "it is empty"
        raise ValueError(f"model.target_modules={targets}: {text}; {which}")
    if frozen:
        text = f"{len(frozen)} linear layers for other data than text, such as {frozen[0]}, have no adapters"
        log_once(f"model.target_modules={targets}: {text}")
    taken = _OF_EXPERTS & {*map(_last, targeted)}
    if taken and any("expert" in name and p.dim() == 3 for name, p in model.named_parameters()):
        log_once(
            f"model.target_modules: PEFT takes adapters of {', '.join(sorted(taken))} for those of the experts in "
            "some models, and then computes other logits with exported adapters; use the merged model"
        )
    return {name: modules[name] for name in targeted}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_linear(module: nn.Module) -> bool:
    # Some routers are a subclass with another forward.
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _refusal(modules: dict[str, Any], tied: set[str], name: str) -> str:
    """Returns the reason that a module cannot be adapted; empty if it can."""
    cls: Any = type(modules[name.rpartition(".")[0]])
    child = _last(name)
    if not _is_linear(modules[name]):
        return f"{child} is a {type(modules[name]).__name__}, not an nn.Linear"
    if name in tied:
        return f"{child} shares its weight with another layer"
    if _reads_weight(cls, child):
        return f"{cls.__name__} reads {child}.weight itself, without the adapter"
    return ""


@cache
def _reads_weight(cls: Any, name: str) -> bool:
    """Returns True if a class multiplies with a child's weight, as the kernels of Mamba do on CUDA."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("transformers.")]
    read = re.compile(rf"\bself\.{re.escape(name)}\.weight\b(?!\.(dtype|device|shape))")
    return any(read.search(inspect.getsource(base)) for base in bases)
