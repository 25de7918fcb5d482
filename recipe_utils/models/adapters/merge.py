"""Export of a model with adapters: the merged base, and the adapters.

Example: in bf16 a weight of 1.0 has neighbors 0.9961 and 1.0078. Adapters that change it by 0.003 are merged to 1.0:
their whole change is lost. One by 0.005 becomes 0.0078. :func:`merge` reports the lost part over all weights.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recipe_utils.models.adapters.lora import Adapters
from recipe_utils.torchtune_names import ADAPTER_CONFIG, ADAPTER_KEY, MODEL_KEY


def contents_of_export(
    weights: dict[str, Tensor], adapters: Adapters, dtype: torch.dtype | None
) -> tuple[dict[str, Any], float]:
    """Returns the contents of a torchtune checkpoint: the merged model if all weights are given, and the adapters.

    Also returns the fraction of the adapters' change that is lost by rounding. ``weights`` are full, of the whole model
    or its adapters only, and merged in place; ``dtype`` None keeps their own.
    """
    contents: dict[str, Any] = {}
    lost = 0.0
    if adapters.modules:
        trained = {name: weights.pop(name) for name in sorted(adapters.trained) if name in weights}
        contents[ADAPTER_KEY] = trained
        first = next(iter(adapters.modules.values()))
        contents[ADAPTER_CONFIG] = {  # PEFT's ``adapter_config.json``, with torchtune's module names
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": first.rank,
            "lora_alpha": first.alpha,
            "lora_dropout": first.dropout,
            "use_dora": first.has_magnitude,
            "bias": "none",
            "target_modules": sorted({name.rsplit(".", 1)[-1] for name in adapters.modules}),
        }
        if weights:
            lost = merge(weights, trained, adapters, dtype)
    if weights:
        contents[MODEL_KEY] = {
            name: weight.to(dtype) if dtype and weight.is_floating_point() else weight
            for name, weight in weights.items()
        }
    return contents, lost


def merge(
    weights: dict[str, Tensor], trained: Mapping[str, Tensor], adapters: Adapters, dtype: torch.dtype | None = None
) -> float:
    """Merges adapters into their base weights, in place; computed in at least fp32 and rounded once.

    All tensors are full (unsharded); ``dtype`` is that of the merged weights, None keeps their own.

    Returns:
        Fraction of the change that is lost by rounding: |merged - exact| / |exact - base|, over all
        weights (Frobenius norms).
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
        # Rounded once. A bf16 weight has 8 bits, so a small change may be lost, which is measured.
        merged = exact.to(dtype or base.dtype)
        lost += float((merged.to(wide) - exact).square().sum())
        changed += float((exact - base.to(wide)).square().sum())
        weights[f"{name}.weight"] = merged
    return math.sqrt(lost / changed) if changed else 0.0
