"""Formats the config keys of recipes as tables, sorted by what a user wants to do."""

import runpy
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from recipe_utils.cli.registry import RECIPES, recipe_path
from recipe_utils.settings.components import MadeWith
from recipe_utils.settings.keys import alternatives_of, keys_of


def load_recipe(recipe: str) -> tuple[type, Any]:
    """Returns the ``Settings`` of a recipe, given by registered name or path, and its class.

    The class is the only one in the file with ``setup`` and ``update``; else None. Raises ValueError if
    there is no such recipe, or it has no ``Settings``.
    """
    if not (path := recipe_path(recipe)).is_file():
        raise ValueError(f"{recipe}: no recipe of this name or path; there are {', '.join(RECIPES)}")
    names_of_file = runpy.run_path(str(path))
    settings: Any = names_of_file.get("Settings")
    if not is_pydantic_dataclass(settings):
        raise ValueError(f"{recipe}: it has no Settings")
    defined = [value for value in names_of_file.values() if getattr(value, "__module__", 0) == "<run_path>"]
    classes = [value for value in defined if hasattr(value, "setup") and hasattr(value, "update")]
    return settings, classes[0] if len(classes) == 1 else None


def settings_of(recipe: str) -> type:
    """Returns the ``Settings`` of a recipe; see :func:`load_recipe`."""
    return load_recipe(recipe)[0]


SECTIONS = {
    "Set first": """model tokenizer checkpointer dataset loss optimizer output_dir device epochs batch_size
        global_batch_size microbatching max_tokens_per_microbatch dtype weights_dtype lr_scheduler clip_grad_norm seed
        compile enable_activation_checkpointing""",
    "Watch a training": """dataset_val run_val_every_n_steps early_stopping_patience
        early_stopping_threshold batch_size_val sample_prompts sample_every_n_steps
        sample_max_new_tokens sample_losses log_every_n_steps log_peak_memory_stats log_config metric_logger profiler""",
    "Save, resume and export": """save_every_n_steps save_every_n_minutes resume_from_checkpoint
        enable_async_checkpointing keep_last_n_checkpoints resume_with_other_data resume_with_other_model
        export_every_n_steps export_dtype keep_last_n_exports keep_best_checkpoint save_adapter_weights_only""",
    "Choose and load samples": """max_steps_per_epoch last_update_step gradient_accumulation_steps shuffle data_seed order
        mixture loss_weights on_bad_sample num_workers prefetch_update_steps balance_over_ranks collate_fn""",
    "Fit a larger model or longer samples": """max_ranks_per_row ac_mode ac_option enable_activation_offloading
        fsdp_cpu_offload fsdp fsdp_reshard_after_forward custom_sharded_layers optimizer_in_bwd""",
    "Use many GPUs": """data_parallel_replicate_dim data_parallel_shard_dim gradient_sync tensor_parallel_dim
        tensor_parallel_plan pipeline_parallel_dim pipeline_parallel_schedule pipeline_parallel_split_points
        process_group_timeout_seconds""",
    "Compare with a reference": "reference ref_checkpointer reference_cache_dir",
    "Tune optimizer and precision": """weight_decay_of_vectors loraplus_lr_ratio on_nonfinite max_nonfinite_steps
        quantizer packed_attention cudnn_deterministic_mode""",
}
"""Purpose -> keys of several recipes; those of one recipe alone have a section of their own."""


def key_page(settings_of_recipes: Mapping[str, type]) -> str:
    """Returns Markdown tables of the keys of recipes: key, its values, meaning.

    Each key stands once, with notes on recipes that lack it or describe it differently.
    """
    keys_of_recipes = {recipe: keys_of(settings) for recipe, settings in settings_of_recipes.items()}
    sections = {title: names.split() for title, names in SECTIONS.items()}
    listed = {name for names in sections.values() for name in names}
    for recipe, keys in keys_of_recipes.items():
        sections[f"Only `{recipe}`"] = [name for name in keys if name not in listed]
    lines = []
    for title, names in sections.items():
        rows = [_row(name, keys_of_recipes) for name in names if any(name in keys for keys in keys_of_recipes.values())]
        if rows:
            lines += [f"## {title}", "", "| key | values | meaning |", "| --- | --- | --- |", *rows, ""]
    return "\n".join(lines)


def _row(name: str, keys_of_recipes: Mapping[str, Mapping[str, FieldInfo]]) -> str:
    specs = {recipe: keys[name] for recipe, keys in keys_of_recipes.items() if name in keys}
    spec = next(iter(specs.values()))
    # The default, or "required", and what it does not show: other words, and types beside null.
    values = [f"required {type_in_words(spec)}"]
    if not spec.is_required():
        others = type_in_words(spec).replace("bool", "False or True").split(" or ")
        if isinstance(spec.default, int | float):  # a number shows that others are numbers
            others = [words for words in others if not words.startswith(("int", "float"))]
        values = [*dict.fromkeys(["null" if spec.default is None else str(spec.default), *others])]
    # The description in the first recipe that has the key, then what differs in others.
    descriptions = {
        recipe: " ".join((spec.description or "").split()).replace("``", "`") for recipe, spec in specs.items()
    }
    first = next(iter(descriptions.values()))
    meanings = [first, *(f"*`{recipe}`*: {text}" for recipe, text in descriptions.items() if text != first)]
    missing = [f"`{recipe}`" for recipe in keys_of_recipes if recipe not in specs]
    if missing and len(specs) > 1:
        meanings.append(f"*Not in {', '.join(missing)}.*")
    return f"| `{name}` | {', '.join(values)} | {' '.join(meanings)} |"


def type_in_words(spec: FieldInfo) -> str:
    """Returns a key's type in words, such as ``int >= 1 or null``."""
    return " or ".join(map(_in_words, alternatives_of(spec)))


def _in_words(annotation: Any) -> str:
    if annotation is NoneType:
        return "null"
    if get_origin(annotation) is Literal:
        return " or ".join(str(option) for option in get_args(annotation))
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        flat = [m for given in metadata for m in getattr(given, "metadata", [given])]
        if any(isinstance(m, MadeWith) for m in flat):
            return "component"
        bounds = [f"> {m.gt}" for m in flat if hasattr(m, "gt")]
        bounds += [f">= {m.ge}" for m in flat if hasattr(m, "ge")]
        return " ".join([_in_words(inner), *bounds])
    if get_origin(annotation) is dict:
        return "mapping"
    if get_origin(annotation) is list:
        return f"list of {_in_words(*get_args(annotation))}"
    return getattr(annotation, "__name__", str(annotation)).replace("Path", "path")
