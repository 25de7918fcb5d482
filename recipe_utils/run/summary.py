"""What a training says at its end, and the config by which its model answers."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipe_utils.settings.components import component_at

_MODEL_FILES = (".safetensors", ".bin", ".pt", ".pth")


def what_was_done(
    num_steps: int, num_seen: int, seconds: float, counted: str = "target tokens"
) -> str:
    """Update steps, what they hold, time and rate in a sentence; of this start, where it went on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(hours or minutes)
    time = " ".join([*parts, f"{rest} s"])
    rate, unit = num_seen / max(seconds, 1e-9), counted.split()[-1]
    return f"{num_steps} update steps, {num_seen:,} {counted} in {time}: {rate:,.0f} {unit}/s"


def what_validation_said(metrics: Sequence[Mapping[str, Any]]) -> str:
    """First, last and best ``val_loss`` or ``knn_accuracy`` of the lines of a metrics file; empty if there is none."""
    for name, best_of in (("val_loss", min), ("knn_accuracy", max)):
        found = {line["step"]: line[name] for line in metrics if line.get(name) is not None}
        if found:
            values = list(found.values())
            step = best_of(found, key=found.__getitem__)
            return (
                f"{name}: first {values[0]:.3f}, last {values[-1]:.3f}, best {found[step]:.3f} (update step "
                f"{step})"
            )
    return ""


def write_generation_config(
    config: Mapping[str, Any], export: Path, path: Path, device: str
) -> bool:
    """Writes a config for torchtune's ``generate`` recipe, by which an exported model answers.

    Args:
        config: of the training, resolved.
        export: folder of the model; adapters are merged into it.
        path: of the new config.
        device: to generate on.

    Returns:
        False, and nothing is written, where it is not known how: adapters alone, a model that is made by an
        unknown builder or says no text.

    Raises:
        OSError: it cannot be written.
    """
    files = sorted(
        file.name
        for file in export.iterdir()
        if file.suffix in _MODEL_FILES and not file.name.startswith("adapter")
    )
    model = without_adapters(config["model"])
    if not files or model is None or "tokenizer" not in config:
        return False
    given = config["checkpointer"]
    component = given["_component_"]
    if component.startswith("recipe_utils."):  # makes its first weights itself
        component = "torchtune.training.FullModelHFCheckpointer"
    generation = {
        "output_dir": str(path.parent / "generation"),
        "model": model,
        "checkpointer": {
            "_component_": component,
            "checkpoint_dir": str(export),
            "checkpoint_files": files,
            "model_type": given.get("model_type", "LLAMA3_2"),
            "output_dir": "${output_dir}",
        },
        "tokenizer": config["tokenizer"],
        "device": device,
        "dtype": config.get("dtype") if config.get("dtype") in ("bf16", "fp32") else "fp32",
        "seed": 1234,
        "prompt": {"system": None, "user": "Who are you?"},
        "max_new_tokens": 100,
        "temperature": 0.6,
        "top_k": 50,
        "enable_kv_cache": True,
        "quantizer": None,
    }
    OmegaConf.save(OmegaConf.create(generation), path)
    return True


def without_adapters(model: Mapping[str, Any]) -> dict[str, Any] | None:
    """The component of a model without the adapters that another has; None if there is no such builder.

    torchtune's builders of adapted models are called as the others, with ``lora_`` or ``qlora_`` before.
    """
    module, _, name = model["_component_"].rpartition(".")
    if "lora_" not in name:
        return dict(model)
    base = f"{module}.{name.split('lora_', 1)[1]}"
    try:
        arguments = inspect.signature(component_at(base)).parameters
    except (ValueError, TypeError):
        return None
    return {"_component_": base, **{key: model[key] for key in model if key in arguments}}
