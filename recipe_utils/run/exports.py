"""Exports a trained model, summarises the run, and writes a config that samples from the model."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torchtune.training.precision import PRECISION_STR_TO_DTYPE

from recipe_utils.checkpoint.export import export
from recipe_utils.model.adapters.merge import contents_of_export
from recipe_utils.model.build.weights import gather_weights
from recipe_utils.model.pipeline.stages import adapters_of
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.run.log import METRICS_FILE, Log, read_metrics
from recipe_utils.run.settings import RunSettings
from recipe_utils.settings.components import component_at

_MODEL_FILES = (".safetensors", ".bin", ".pt", ".pth")


def export_model(
    checkpointer: Any,
    model: nn.Module,
    name: str,
    *,
    settings: RunSettings,
    dtype: str | None,
    ranks: Ranks,
    group: dist.ProcessGroup,
    log: Log,
) -> tuple[Path | None, str | None]:
    """Exports a model atomically in the checkpointer's format, with adapters merged or alone.

    All ranks call it. Returns the folder, on rank 0 only, and the error message on all ranks, None
    on success.

    Args:
        checkpointer: a torchtune checkpointer.
        model: model or pipeline stages, sharded or not.
        name: name of the folder.
        settings: contains ``export_dtype`` and ``save_adapter_weights_only``.
        dtype: default of ``export_dtype``.
        ranks: ranks of the job.
        group: CPU group of all ranks.
        log: receives messages and warnings.
    """
    adapters = adapters_of(model)
    adapters_only = settings.save_adapter_weights_only and adapters.modules
    weights = gather_weights(
        model,
        ranks.device,
        keeps=ranks.dp_rank == 0,
        group=group,
        only=adapters.trained if adapters_only else None,
    )
    folder = error = None
    if nonfinite := [key for key, weight in weights.items() if not weight.isfinite().all()]:
        error = (
            f"{name}: not exported, {len(nonfinite)} of {len(weights)} weights are NaN or infinite, "
            f"{nonfinite[0]} among them"
        )
    elif ranks.is_zero:
        export_dtype = PRECISION_STR_TO_DTYPE.get(settings.export_dtype or dtype)
        try:
            contents, lost = contents_of_export(weights, adapters, export_dtype)
            folder = export(checkpointer, contents, name)
            log.info(f"Exported to {folder}")
            if lost > 0.01:
                log.warn(
                    f"{name}: {lost:.0%} of what the adapters change is lost by rounding the merged "
                    f"weights; export_dtype=fp32 keeps it, and so do the adapters in {name}/adapter"
                )
        except Exception as failure:  # any: the other ranks wait for the result
            error = str(failure)
    error = gather_objects(error, group)[0]
    log.warn(error or "")
    return folder, error


def log_model(
    folder: Path, output_dir: Path, config: Mapping[str, Any], device: str, log: Log
) -> None:
    """Logs validation results, the exported folder, and a command that samples from the model."""
    path, metrics = output_dir / "generation.yaml", output_dir / "logs" / METRICS_FILE
    try:
        log.info(summary_of_validation(read_metrics(metrics) if metrics.exists() else []))
        log.info(f"Model: {folder}")
        if write_generation_config(config, folder, path, device):
            log.info(f"Ask it: tune run generate --config {path} prompt.user='...'")
    except OSError as error:
        log.warn(f"output_dir: {error}")


def summary_of_training(
    num_steps: int, num_seen: int, seconds: float, counted: str = "target tokens"
) -> str:
    """Returns a sentence with the number of update steps, their data, time and rate."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(hours or minutes)
    time = " ".join([*parts, f"{rest} s"])
    rate, unit = num_seen / max(seconds, 1e-9), counted.split()[-1]
    return f"{num_steps} update steps, {num_seen:,} {counted} in {time}: {rate:,.0f} {unit}/s"


def summary_of_validation(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Returns first, last and best ``val_loss`` or ``knn_accuracy`` as text, empty without any."""
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
    """Writes a config of torchtune's ``generate`` recipe for the exported model to ``path``.

    ``config`` is the training config, resolved. Returns False, and writes nothing, for adapters
    alone, unknown builders and models without a tokenizer.
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
    if component.startswith("recipe_utils."):  # it would create new weights
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
    """Returns the component of a model without adapters; None if there is no such builder.

    torchtune's builders of adapted models have the prefix ``lora_`` or ``qlora_``.
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
