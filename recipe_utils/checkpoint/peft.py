"""Adapters in the format of PEFT and vLLM: torchtune's names and row order, converted to Hugging Face's.

torchtune's own files are wrong in two ways: those of DoRA lack the DoRA flag, and the rows of
DoRA's magnitudes and of Qwen2's queries and keys are in another order than the weights'. PEFT
silently computes other logits.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torchtune.models.convert_weights import (
    _FROM_HF,
    get_mapped_key,
    tune_to_peft_adapter_config,
)
from torchtune.training import FullModelHFCheckpointer, ModelType

DESCRIPTION = "trained_with.json"
"""File beside adapters: their ``lora_alpha``, and fingerprints of the base's weights as ``frozen``."""

_OF_PEFT = {
    "lora_a.weight": "lora_A.weight",
    "lora_b.weight": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}
# torchtune rotates pairs of neighbours where Hugging Face rotates halves, except in these models.
_ROWS_ALIKE = {ModelType.QWEN2}


def write_peft(
    folder: Path, checkpointer: Any, adapters: Mapping[str, Tensor], adapter_config: dict[str, Any]
) -> None:
    """Replaces the files that torchtune's checkpointer has written for PEFT, if there are any.

    Only checkpointers of Hugging Face's format write them, and not for all models. ``adapters`` are
    full (unsharded); they and ``adapter_config`` have torchtune's names.
    """
    path = folder / "adapter_model.safetensors"
    if not isinstance(checkpointer, FullModelHFCheckpointer) or not path.is_file():
        return
    hf_config = checkpointer._config
    has_other_rows = checkpointer._model_type not in _ROWS_ALIKE
    converted = {
        _peft_name(name): (
            _rows_of_hugging_face(name, tensor, hf_config) if has_other_rows else tensor
        )
        for name, tensor in adapters.items()
    }
    save_file({n: t.contiguous() for n, t in converted.items()}, path, metadata={"format": "pt"})
    # PEFT requires the name of the base model: that on the hub, or else a local folder.
    base = checkpointer.repo_id or str(checkpointer._checkpoint_dir.resolve())
    content = tune_to_peft_adapter_config(dict(adapter_config), base)
    (folder / "adapter_config.json").write_text(json.dumps(content, indent=1))


def _peft_name(name: str) -> str:
    part = next(part for part in _OF_PEFT if name.endswith(f".{part}"))
    of_weight = {tune: hf for hf, tune in _FROM_HF.items() if tune is not None}
    weight = get_mapped_key(name.removesuffix(part) + "weight", of_weight)
    return f"base_model.model.{weight.removesuffix('weight')}{_OF_PEFT[part]}"


def _rows_of_hugging_face(name: str, tensor: Tensor, hf_config: Mapping[str, Any]) -> Tensor:
    """Permutes the output rows of q_proj and k_proj as the checkpointer permutes those of the weights."""
    for projection, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".{projection}." in name and not name.endswith("lora_a.weight"):
            num_heads = hf_config[key]
            pairs = tensor.view(num_heads, len(tensor) // num_heads // 2, 2, *tensor.shape[1:])
            return pairs.transpose(1, 2).reshape(tensor.shape)
    return tensor
