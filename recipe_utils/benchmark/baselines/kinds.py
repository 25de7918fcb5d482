"""Kinds of baselines of each recipe, their requirements and limitations."""

import importlib.util

from recipe_utils.models.adapters.lora import Adapters

TEXT = "full_finetune_update_step"
PAIRS = "full_dpo_update_step"
DISTILLATION = "knowledge_distillation_update_step"
POLICY = "full_policy_update_step"

KINDS: dict[str, dict[str, str]] = {
    TEXT: {
        "stock": "stock.train",
        "update_step": "update_step.train",
        "hf_trainer": "hugging_face.train_hf_trainer",
        "trl_sft": "trl_sft.train",
        "limit": "bare_loop.train_text",
    },
    PAIRS: {"stock": "stock.train_dpo", "update_step": "update_step.train"},
    DISTILLATION: {"stock": "stock.train_distillation", "update_step": "update_step.train"},
    POLICY: {"update_step": "update_step.train", "trl": "trl_policy.train"},
}
"""Recipe -> kind -> function in this package that trains with a resolved update-step config; ``update_step.train``
also takes the recipe's name or path."""
OWN_KEYS = {"hf_trainer": {"train_sampling_strategy"}, "trl": {"grpo"}, "trl_sft": {"sft"}}
"""Kind whose model is transformers' -> config keys of this kind only."""


def why_skipped(recipe: str, kind: str, num_ranks: int, adapters: Adapters) -> str | None:
    """Returns the reason that a baseline cannot run, or None."""
    needed = {"hf_trainer": ("transformers", "accelerate"), "trl": ("trl",), "trl_sft": ("trl",)}.get(kind, ())
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    reasons = {
        "runs as one process only": num_ranks > 1
        and (kind in ("limit", "trl", "trl_sft") or (recipe, kind) == (DISTILLATION, "stock")),
        "trains no adapters": kind in OWN_KEYS and adapters.modules,
        "trains no adapters on pairs": (recipe, kind) == (PAIRS, "stock") and adapters.modules,
        "has no base in torchao's NF4": kind == "limit" and any(adapters.frozen.values()),
        f"{' and '.join(missing)} not installed (pip install {' '.join(missing)})": missing,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
