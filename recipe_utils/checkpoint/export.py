"""Atomic export of a model in the checkpointer's own format, and a config that samples from it."""

import copy
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torchtune import training

from recipe_utils.checkpoint.peft import DESCRIPTION, write_peft
from recipe_utils.files import fsync_folder, if_supported, publish
from recipe_utils.settings.components import component_at, taken_by
from recipe_utils.torchtune_names import ADAPTER_CONFIG, ADAPTER_KEY, MODEL_KEY, log_once

_MODEL_FILES = (".safetensors", ".bin", ".pt", ".pth")
WEIGHTS = (*_MODEL_FILES, ".index.json", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".tflite", ".ckpt", ".pkl")
"""Suffixes of weight files."""
_COPIED = re.compile(
    r".*\.(json|jinja2?|txt|md|py|ya?ml|model|spm|tiktoken|bpe|codes|dict|pdf|png|jpe?g|svg)"
    r"|.*(tokenizer|vocab|merges).*|(licen[cs]e|notice|copying|readme|use_policy)[^.]*",
    re.IGNORECASE,
)
"""Names of the files that an export takes from the folder of a model: all that transformers, PEFT and vLLM read."""
_NOT_OF_A_MODEL = re.compile(r"\..*|.*\.tmp|(step|epoch|export_step|checkpoint)[_-]\d+|best|before_.*|logs|adapter")
"""Subfolders of the folder of a model that are caches, or outputs of a training."""
_STOCK = (training.FullModelHFCheckpointer, training.FullModelMetaCheckpointer, training.FullModelTorchTuneCheckpointer)
ADAPTER_FOLDER = "adapter"
"""Subfolder of an exported folder with the adapters.

If PEFT is installed, transformers applies an ``adapter_config.json`` beside a model to it, but the
exported model already has its adapters merged.
"""


class ExportError(RuntimeError):
    """The export of a model failed."""


def export(checkpointer: Any, contents: dict[str, Any], name: str, fingerprints: Mapping[str, str] = {}) -> Path:
    """Saves a model, its adapters or both as a folder in the checkpointer's output folder, and returns its path.

    The checkpointer writes into a temporary folder, which is synced and then renamed; it replaces
    an existing folder of that name. Files get the mode that the umask allows.

    ``checkpointer`` is one of torchtune's that has loaded the initial weights; ``contents`` are full (unsharded)
    tensors by torchtune's names, under torchtune's keys; ``fingerprints`` are those of the adapters' base. If the
    export fails, it raises ExportError, removes its files and leaves an existing folder unchanged.
    """
    output_dir = Path(checkpointer._output_dir)
    temporary = output_dir / "export.tmp"  # a leftover is removed by recipe_utils.checkpoint.folder
    redirected = copy.copy(checkpointer)
    redirected._output_dir = temporary
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_stock := isinstance(checkpointer, _STOCK):
            # It would copy modes, too, which not all filesystems support, and other frameworks' weights.
            redirected._checkpoint_dir = temporary / "nothing"
        redirected.save_checkpoint(
            {key: copy.copy(content) for key, content in contents.items()},  # it is modified
            epoch=0,
            # Checkpointers for full models only do not have the argument.
            **({} if MODEL_KEY in contents else {"adapter_only": True}),
        )
        folder = temporary / "epoch_0"
        if is_stock:
            copy_files(checkpointer._checkpoint_dir, folder)
        adapters = contents.get(ADAPTER_KEY)
        if adapters is not None:
            write_peft(folder, checkpointer, adapters, contents[ADAPTER_CONFIG])
            (folder / ADAPTER_FOLDER).mkdir(exist_ok=True)
            for path in list(folder.glob("adapter_*")):
                path.rename(folder / ADAPTER_FOLDER / path.name)
            described = {"lora_alpha": contents[ADAPTER_CONFIG]["lora_alpha"], "frozen": dict(fingerprints)}
            (folder / ADAPTER_FOLDER / DESCRIPTION).write_text(json.dumps(described))
        _apply_umask(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            fsync_folder(path)
        publish(folder, output_dir / name)
    except Exception as error:
        raise ExportError(f"{output_dir / name}: it could not be exported ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output_dir / name


def copy_files(base: str | Path, folder: Path, skipped: str | None = None) -> None:
    """Copies configs, tokenizers, templates, code and texts of a model's folder, and logs other files but weights once.

    Subfolders, too, but no caches, outputs of a training, or one named ``skipped``.
    """
    unknown = []
    for root, subfolders, names in os.walk(base):
        subfolders[:] = [
            name
            for name in subfolders
            if name != skipped and not _NOT_OF_A_MODEL.fullmatch(name)
            if not folder.resolve().is_relative_to(Path(root, name).resolve())  # the output folder
        ]
        for path in (Path(root, name) for name in names if not name.startswith((".", "adapter_"))):
            copied = folder / path.relative_to(base)
            if path.name.endswith((*WEIGHTS, ".lock")) or not path.is_file():
                continue
            if _COPIED.fullmatch(path.name) and path.stat().st_size < 1 << 28:  # a tokenizer.json may have 60 MB
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copied)  # without its mode
            else:
                unknown.append(str(path.relative_to(base)))
    if unknown:
        shown = ", ".join(sorted(unknown)[:5])
        log_once(f"{base}: exports lack {len(unknown)} of its files, which may be old weights: {shown}")


def _apply_umask(folder: Path) -> None:
    """Gives files below ``folder`` the mode of new ones: safetensors writes 0600."""
    # Reading the umask requires setting it, for all threads of the process.
    new = folder / "new"
    new.touch()
    mode = new.stat().st_mode
    new.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode != mode:
            with if_supported("chmod"):
                path.chmod(mode)


def write_generation_config(config: Mapping[str, Any], folder: Path, path: Path, device: str) -> bool:
    """Writes a config of torchtune's ``generate`` recipe for the model exported to ``folder`` to ``path``.

    ``config`` is the training config, resolved. Returns False, and writes nothing, for adapters
    alone, unknown builders, models without a tokenizer or of transformers, and Gemma 2, which
    ``generate`` loads wrong (:mod:`recipe_utils.checkpoint`).
    """
    files = sorted(
        file.name for file in folder.iterdir() if file.suffix in _MODEL_FILES and not file.name.startswith("adapter")
    )
    # The export has its adapters merged, so it is loaded as a plain model.
    model = _without_adapters(config["model"])
    is_gemma2 = config["checkpointer"].get("model_type") == "GEMMA2"
    component = config["checkpointer"]["_component_"]
    is_folder = component.endswith(".FolderCheckpointer")
    if not files or model is None or "tokenizer" not in config or is_gemma2 or is_folder:
        return False
    if component.startswith("recipe_utils."):  # it would create new weights
        component = "torchtune.training.FullModelHFCheckpointer"
    checkpointer = {
        "_component_": component,
        "checkpoint_dir": str(folder),
        "checkpoint_files": files,
        "model_type": config["checkpointer"].get("model_type", "LLAMA3_2"),
        "output_dir": "${output_dir}",
    }
    generation = {
        "output_dir": str(path.parent / "generation"),
        "model": model,
        "checkpointer": checkpointer,
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


def _without_adapters(model: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the component of a model without adapters; None if there is no such builder."""
    # torchtune's builders of adapted models have the prefix lora_ or qlora_.
    module, _, name = model["_component_"].rpartition(".")
    if "lora_" not in name:
        return dict(model)
    base = f"{module}.{name.split('lora_', 1)[1]}"
    try:
        component_at(base)
    except ValueError:
        return None
    return {**taken_by({"_component_": base}, model), "_component_": base}
