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
    """What a config or a checkpoint is told that still has a removed key."""

    text: str
    """What it was, and what to do instead."""
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


MOVED: Mapping[str, str] = {
    "recipe_utils.checkpoint.dinov3_vit.DINOv3Checkpointer": "recipe_utils.dinov3.DINOv3Checkpointer",
    "recipe_utils.checkpoint.transformers.FolderCheckpointer": "recipe_utils.checkpoint.FolderCheckpointer",
    "recipe_utils.data.chat_template.conversation_dataset": "recipe_utils.text.conversation_dataset",
    "recipe_utils.data.chat_template.folder_tokenizer": "recipe_utils.text.folder_tokenizer",
    "recipe_utils.data.chat_template.pair_dataset": "recipe_utils.preference.pair_dataset",
    "recipe_utils.data.chat_template.text_pieces_dataset": "recipe_utils.text.text_pieces_dataset",
    "recipe_utils.data.images.MultiCrop": "recipe_utils.dinov3.MultiCrop",
    "recipe_utils.data.images.folders.hf_image_dataset": "recipe_utils.dinov3.hf_image_dataset",
    "recipe_utils.data.images.folders.image_folder_dataset": "recipe_utils.dinov3.image_folder_dataset",
    "recipe_utils.data.images.image_folder_dataset": "recipe_utils.dinov3.image_folder_dataset",
    "recipe_utils.data.images.multi_crop.MultiCrop": "recipe_utils.dinov3.MultiCrop",
    "recipe_utils.embedded.digits.digits_dataset": "recipe_utils.examples.digits_dataset",
    "recipe_utils.embedded.fresh_weights.fresh_llama_checkpointer": "recipe_utils.examples.fresh_llama_checkpointer",
    "recipe_utils.embedded.stdlib_code.code_dataset": "recipe_utils.examples.code_dataset",
    "recipe_utils.embedded.stdlib_conversations.conversation_dataset": "recipe_utils.examples.conversation_dataset",
    "recipe_utils.embedded.stdlib_conversations.conversation_tokenizer": "recipe_utils.examples.conversation_tokenizer",
    "recipe_utils.embedded.stdlib_docs.docstring_dataset": "recipe_utils.examples.docstring_dataset",
    "recipe_utils.embedded.stdlib_docs.docstring_tokenizer": "recipe_utils.examples.docstring_tokenizer",
    "recipe_utils.embedded.stdlib_preferences.word_order_dataset": "recipe_utils.examples.word_order_dataset",
    "recipe_utils.loss.LinearCrossEntropyLoss": "recipe_utils.losses.LinearCrossEntropyLoss",
    "recipe_utils.loss.LinearDistillationLoss": "recipe_utils.distillation.LinearDistillationLoss",
    "recipe_utils.loss.distillation.LinearDistillationLoss": "recipe_utils.distillation.LinearDistillationLoss",
    "recipe_utils.loss.linear_cross_entropy.LinearCrossEntropyLoss": "recipe_utils.losses.LinearCrossEntropyLoss",
    "recipe_utils.loss.preference.IPOLoss": "recipe_utils.preference.IPOLoss",
    "recipe_utils.loss.preference.NormalizedDPOLoss": "recipe_utils.preference.NormalizedDPOLoss",
    "recipe_utils.loss.preference.RobustDPOLoss": "recipe_utils.preference.RobustDPOLoss",
    "recipe_utils.loss.preference.SimPOLoss": "recipe_utils.preference.SimPOLoss",
    "recipe_utils.model.transformers.causal_lm": "recipe_utils.models.causal_lm",
    "recipe_utils.model.transformers.lora_causal_lm": "recipe_utils.models.lora_causal_lm",
    "recipe_utils.model.vision.dinov3_vit": "recipe_utils.dinov3.dinov3_vit",
    "recipe_utils.model.vision.dinov3_vit_b16": "recipe_utils.dinov3.dinov3_vit_b16",
    "recipe_utils.model.vision.dinov3_vit_l16": "recipe_utils.dinov3.dinov3_vit_l16",
    "recipe_utils.model.vision.dinov3_vit_s16": "recipe_utils.dinov3.dinov3_vit_s16",
    "recipe_utils.model.vision.vision_transformer.dinov3_vit": "recipe_utils.dinov3.dinov3_vit",
    "recipe_utils.model.vision.vision_transformer.dinov3_vit_b16": "recipe_utils.dinov3.dinov3_vit_b16",
    "recipe_utils.model.vision.vision_transformer.dinov3_vit_l16": "recipe_utils.dinov3.dinov3_vit_l16",
    "recipe_utils.model.vision.vision_transformer.dinov3_vit_s16": "recipe_utils.dinov3.dinov3_vit_s16",
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
    of_mapping = [f"{name}.{each}" for each in value] if isinstance(value, Mapping) else []
    for each in (name, *of_mapping):
        if each in REMOVED:
            return Problem(key, f"removed; {REMOVED[each].text}", value)
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
