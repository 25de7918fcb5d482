"""Keys of configs that are not keys of a recipe: accepted without effect, or removed since 0.5."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from recipe_utils.settings.problems import Problem

_ROWS = (
    "here a row spans ranks only where it is too long for one; set it to 1, microbatching=packed, "
    "max_tokens_per_microbatch=<tokens that fit on one rank> and max_ranks_per_row=2 or more"
)
WITHOUT_EFFECT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "context_parallel_dim": ((1,), _ROWS),
    "gram_over": (("image",), "patches of several images make it depend on the split; take it out"),
    "low_cpu_ram": ((True, False), "take it out"),
    "memory_efficient_fsdp_wrap": ((False,), "it must be False"),
    "precompute_reference": ((True, False), "take it out"),
}
"""Keys, most of torchtune's configs -> values that are accepted, and what to do about any other."""


class Removed(NamedTuple):
    """Removed key that a config or a checkpoint may still have."""

    text: str
    """Its former meaning, and what to do instead."""
    changes_losses: bool | tuple[str, ...] = False
    """A run that had it, or one of these values, cannot be resumed with the same losses."""


_TEACHER_CACHE = "it stored a teacher's outputs before training; the teacher runs in every update step: remove it"
_SPIKES = "it skipped update steps with a gradient norm far above the median; set clip_grad_norm instead"
REMOVED: Mapping[str, Removed] = {
    "baseline": Removed("it named the baseline that ratios are taken over; write reference"),
    "dataset.max_epochs": Removed("it bounded passes over a dataset; the log shows them, set weight"),
    "dataset.weight.0": Removed(
        "weights by update step; set one number, and resume with resume_with_other_data=True to change it"
    ),
    "global_batch_size.0": Removed("sizes by update step; set one number, such as the last one", changes_losses=True),
    "microbatch_overhead_slots": Removed(
        "it was the cost of one more microbatch, which is now a constant of the device; take it out"
    ),
    "mixture.temperature": Removed(
        "weights by length; set weight of each dataset (length ** (1 / temperature) gives the same)"
    ),
    "mixture.weigh": Removed(
        "weights are those of samples; take it out, and divide weight by target tokens per sample"
    ),
    "on_spike": Removed(_SPIKES, changes_losses=True),
    "peers": Removed("it contained the baselines; write baselines"),
    "spike_factor": Removed(_SPIKES),
    "teacher_cache": Removed(_TEACHER_CACHE, changes_losses=("top_k",)),
    "teacher_cache_dir": Removed(_TEACHER_CACHE),
    "teacher_tokenizer": Removed(
        "it was compared with tokenizer; the tokenizer.json beside both weights are: remove it"
    ),
    "teacher_top_k": Removed(_TEACHER_CACHE),
    "teacher_top_k_at_any_temperature": Removed(_TEACHER_CACHE),
}
"""Key, argument (``mixture.weigh``) or key of a mapping (``global_batch_size.0``) -> what became of it."""


_DINOV3_VITS = "dinov3_vit dinov3_vit_b16 dinov3_vit_l16 dinov3_vit_s16"
_MOVED_NAMES = {
    ("checkpoint.dinov3_vit", "dinov3"): "DINOv3Checkpointer",
    ("checkpoint.transformers", "checkpoint"): "FolderCheckpointer",
    ("data.chat_template", "preference"): "pair_dataset",
    ("data.chat_template", "text"): "conversation_dataset folder_tokenizer text_pieces_dataset",
    ("data.images", "dinov3"): "MultiCrop image_folder_dataset",
    ("data.images.folders", "dinov3"): "hf_image_dataset image_folder_dataset",
    ("data.images.multi_crop", "dinov3"): "MultiCrop",
    ("embedded.digits", "examples"): "digits_dataset",
    ("embedded.fresh_weights", "examples"): "fresh_llama_checkpointer",
    ("embedded.stdlib_code", "examples"): "code_dataset",
    ("embedded.stdlib_conversations", "examples"): "conversation_dataset conversation_tokenizer",
    ("embedded.stdlib_docs", "examples"): "docstring_dataset docstring_tokenizer",
    ("embedded.stdlib_preferences", "examples"): "word_order_dataset",
    ("loss", "losses"): "LinearCrossEntropyLoss",
    ("loss", "distillation"): "LinearDistillationLoss",
    ("loss.distillation", "distillation"): "LinearDistillationLoss",
    ("loss.linear_cross_entropy", "losses"): "LinearCrossEntropyLoss",
    ("loss.preference", "preference"): "IPOLoss NormalizedDPOLoss RobustDPOLoss SimPOLoss",
    ("model.transformers", "models"): "causal_lm lora_causal_lm",
    ("model.vision", "dinov3"): _DINOV3_VITS,
    ("model.vision.vision_transformer", "dinov3"): _DINOV3_VITS,
}
"""Package in 0.5, and in 0.6, without ``recipe_utils.`` -> names of components."""
MOVED: Mapping[str, str] = {
    f"recipe_utils.{before}.{name}": f"recipe_utils.{now}.{name}"
    for (before, now), names in _MOVED_NAMES.items()
    for name in names.split()
}
"""Components of 0.5 -> 0.6"""


def with_new_names(value: Any) -> Any:
    """Returns a value of a checkpoint of 0.5 with the new names of components, in any nesting."""
    if isinstance(value, Mapping):
        return {key: with_new_names(part) for key, part in value.items()}
    if isinstance(value, list):
        return [with_new_names(part) for part in value]
    return MOVED.get(value, value) if isinstance(value, str) else value


def problem_with_word(key: str, value: Any) -> Problem | None:
    """Returns the problem of a key, or a dotted argument, that is removed or must keep its value."""
    name = re.sub(r"\.\d+", "", key)
    keys_of_mapping = [f"{name}.{part}" for part in value] if isinstance(value, Mapping) else []
    for word in (name, *keys_of_mapping):
        if word in REMOVED:
            return Problem(key, f"removed; {REMOVED[word].text}", value)
    accepted, text = WITHOUT_EFFECT.get(name, ((value,), ""))
    return None if value in accepted else Problem(key, text, value)


def removed_of_run(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields ``KEY=VALUE`` of a checkpoint's config that losses depended on and that are removed."""
    given = dict(config)
    for key, value in config.items():
        if isinstance(value, dict):
            given |= {f"{key}.{name}": part for name, part in value.items()}
    for name in sorted(given.keys() & REMOVED.keys()):
        value, changes = given[name], REMOVED[name].changes_losses
        if value in changes if isinstance(changes, tuple) else changes and value not in (None, False):
            yield f"{name}={value}"
