"""Kinds of baselines of each recipe, their requirements and limitations."""

import importlib.util

from recipe_utils.model.adapters.adapters import Adapters

TEXT = "full_finetune_update_step"
PAIRS = "full_dpo_update_step"
DISTILLATION = "knowledge_distillation_update_step"

KINDS: dict[str, dict[str, str]] = {
    TEXT: {
        "stock": "stock.train",
        "update_step": "update_step.train_text",
        "hf_trainer": "hugging_face.train_hf_trainer",
        "trl": "hugging_face.train_trl_sft",
        "limit": "bare_loop.train_text",
    },
    PAIRS: {
        "stock": "stock.train_dpo",
        "update_step": "update_step.train_dpo",
        "trl": "hugging_face.train_trl_dpo",
    },
    DISTILLATION: {
        "stock": "stock.train_distillation",
        "update_step": "update_step.train_distillation",
        "trl": "hugging_face.train_trl_gkd",
    },
}
"""Recipe -> kind -> function in this package that trains with a resolved update-step config."""
OWN_KEYS: dict[str, dict[str, set[str]]] = {
    TEXT: {
        "hf_trainer": {"train_sampling_strategy", "attn_implementation"},
        "trl": {"padding_free", "attn_implementation"},
        "limit": {"max_tokens_per_row"},
    },
    PAIRS: {"trl": {"precompute_ref_log_probs", "attn_implementation"}},
    DISTILLATION: {"trl": {"attn_implementation"}},
}
"""Recipe -> kind -> config keys of this kind only."""
NEEDS = {
    "hf_trainer": ("transformers", "accelerate"),
    "trl": ("transformers", "accelerate", "peft", "trl"),
}
"""Kind -> optional packages."""


def why_skipped(
    recipe: str, kind: str, num_ranks: int, is_packed: bool, adapters: Adapters, kd_ratio: float
) -> str | None:
    """Returns the reason that a baseline cannot run, or None. ``is_packed``: packed dataset."""
    if kind in ("hf_trainer", "trl", "limit") and is_packed:
        return "reads no packed dataset"
    has_one_process = kind == "limit" or (recipe == DISTILLATION and kind == "stock")
    if has_one_process and num_ranks > 1:
        return "runs as one process only"
    if kind == "hf_trainer" and adapters.modules:
        return "trains no adapters; kind=trl does"
    if recipe == PAIRS and kind != "update_step" and adapters.modules:
        return "trains no adapters on pairs"
    if recipe == DISTILLATION and kind == "trl" and adapters.modules:
        return "trains no adapters with a teacher"
    if recipe == DISTILLATION and kind == "trl" and kd_ratio != 1:
        return "computes no cross-entropy; set kd_ratio=1"
    if recipe == TEXT and kind == "trl" and not adapters.modules:
        return "trains adapters only; kind=hf_trainer trains whole models"
    if kind in ("trl", "limit") and any(adapters.frozen.values()):
        return "has no base in torchao's NF4"
    missing = [package for package in NEEDS.get(kind, ()) if not importlib.util.find_spec(package)]
    if missing:
        return f"{' and '.join(missing)} not installed (pip install {' '.join(missing)})"
    return None
