"""Adapters in the format of PEFT and vLLM: torchtune's names and row order, converted to Hugging Face's.

torchtune's own files are wrong in two ways: those of DoRA lack the DoRA flag, and the rows of DoRA's magnitudes and of
Qwen2's queries and keys are in another order than the weights'. PEFT silently computes other logits.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchtune.models.convert_weights import _FROM_HF, get_mapped_key, tune_to_peft_adapter_config
from torchtune.training import FullModelHFCheckpointer, ModelType

from recipe_utils.torchtune_names import ADAPTER_CONFIG, ADAPTER_KEY

DESCRIPTION = "trained_with.json"
"""File beside adapters: their ``lora_alpha``, and fingerprints of the base's weights as ``frozen``."""

_OF_BASE = "base_model.model."
_OF_PEFT = {"lora_a.weight": "lora_A.weight", "lora_b.weight": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


def load_checkpoint(
    checkpointer: Any, cfg_checkpointer: Mapping[str, Any] = MappingProxyType({}), images: bool = False
) -> dict[str, Any]:
    """Loads a checkpoint, with the adapters of ``adapter_checkpoint``; of a model of transformers that takes ``images``.

    torchtune's checkpointers read it only with a recipe state. Files beside it describe the
    training: ``lora_alpha`` and ``frozen``. Raises ValueError if it is missing or unreadable.
    """
    loaded: dict[str, Any] = checkpointer.load_checkpoint(**({"images": True} if images else {}))
    name = cfg_checkpointer.get("adapter_checkpoint")
    if name is None or ADAPTER_KEY in loaded:
        return loaded
    path = Path(cfg_checkpointer["output_dir"], name)
    if not path.is_file():
        raise ValueError(f"checkpointer.adapter_checkpoint={name}: {path} is no file")
    try:
        adapters = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many classes
        raise ValueError(
            f"checkpointer.adapter_checkpoint={name}: it holds no tensors that torch.load takes "
            f"({type(error).__name__}); set it to an adapter_model.pt"
        ) from error
    described: dict[str, Any] = {}
    for name in ("adapter_config.json", DESCRIPTION):
        with suppress(OSError, ValueError):
            described |= json.loads(path.with_name(name).read_text())
    return {**loaded, ADAPTER_KEY: adapters, ADAPTER_CONFIG: described}


def write_peft(folder: Path, checkpointer: Any, adapters: Mapping[str, Tensor], adapter_config: dict[str, Any]) -> None:
    """Replaces the files that torchtune's checkpointer has written for PEFT, if there are any.

    Only checkpointers of Hugging Face's format write them, and not for all models. ``adapters`` are
    full (unsharded); they and ``adapter_config`` have torchtune's names.
    """
    path = folder / "adapter_model.safetensors"
    if not isinstance(checkpointer, FullModelHFCheckpointer) or not path.is_file():
        return
    to_hf = {tune: hf for hf, tune in _FROM_HF.items() if tune is not None}
    # torchtune rotates pairs of neighbors where Hugging Face rotates halves, except in Qwen 2. So the output rows of
    # q_proj and k_proj are permuted, as the checkpointer permutes those of the weights.
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    if checkpointer._model_type is ModelType.QWEN2:
        heads = {}
    converted = {}
    for name, tensor in adapters.items():
        module, part = next((name.removesuffix(part), part) for part in _OF_PEFT if name.endswith(f".{part}"))
        num_heads = checkpointer._config.get(heads.get(module.split(".")[-2]))
        if num_heads is not None and part != "lora_a.weight":
            pairs = tensor.view(num_heads, len(tensor) // num_heads // 2, 2, *tensor.shape[1:])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        weight = get_mapped_key(f"{module}weight", to_hf)
        converted[f"{_OF_BASE}{weight.removesuffix('weight')}{_OF_PEFT[part]}"] = tensor
    # PEFT requires the name of the base model: that on the hub, or else a local folder.
    base = checkpointer.repo_id or str(checkpointer._checkpoint_dir.resolve())
    _write(folder, converted, tune_to_peft_adapter_config(dict(adapter_config), base))


def write_peft_of_transformers(
    folder: Path, base: Path, adapters: Mapping[str, Tensor], adapter_config: Mapping[str, Any]
) -> None:
    """Writes the files for PEFT of full adapters of a model of transformers, whose weights are in the folder ``base``."""
    # Whole names of modules, because their last parts may also be those of other layers.
    modules = {name.partition(".lora_")[0].removesuffix(".magnitude") for name in adapters}
    described = {"target_modules": sorted(modules), "base_model_name_or_path": str(base.resolve())}
    converted = {_OF_BASE + _renamed(name, _OF_PEFT): t for name, t in adapters.items()}
    _write(folder, converted, {**adapter_config, **described})


def _write(folder: Path, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(content, indent=1))


def read_peft_of_transformers(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads adapters, named as for :func:`write_peft_of_transformers`, and the JSON files beside them.

    Products of adapters are multiplied with ``lora_alpha / r``. Raises ValueError if a file is
    missing or unreadable, or has adapters that LoRA and DoRA here do not compute.
    """
    key = f"checkpointer.adapter_checkpoint={path}"
    try:
        tensors = load_file(path)
        described = json.loads(path.with_name("adapter_config.json").read_text())
    except Exception as error:  # safetensors raises classes of its own
        remedy = "set it to an adapter_model.safetensors of PEFT beside its adapter_config.json"
        raise ValueError(f"{key}: {error}; {remedy}") from error
    values: dict[str, Any] = {
        "alpha_pattern": ({}, None),
        "bias": ("none", None),
        "fan_in_fan_out": (False, None),
        "layers_to_transform": (None,),
        "modules_to_save": (None, []),
        "peft_type": ("LORA", None),
        "trainable_token_indices": (None,),
        "init_lora_weights": (True, False, "gaussian", None),
    }
    for name, supported in values.items():  # other initial values change the base
        if described.get(name) not in supported:
            text = f"its adapter_config.json has {name}={described[name]}, which is not supported"
            raise ValueError(f"{key}: {text}; set it to adapters that were trained without")
    if described.get("use_rslora"):
        described["lora_alpha"] *= described["r"] ** 0.5
    with suppress(OSError, ValueError):
        described |= json.loads(path.with_name(DESCRIPTION).read_text())
    ours = {theirs: ours for ours, theirs in _OF_PEFT.items()}
    return {_renamed(n.removeprefix(_OF_BASE), ours): t for n, t in tensors.items()}, described


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    """Returns an adapter's name with its last part renamed; other names as they are."""
    part = next((part for part in parts if name.endswith(f".{part}")), "")
    return name.removesuffix(part) + parts.get(part, "")
