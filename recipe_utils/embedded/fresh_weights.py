"""Start from fresh weights instead of a downloaded checkpoint."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import save
from torch import nn
from torchtune import config
from torchtune.models.convert_weights import tune_to_hf
from torchtune.training import FullModelHFCheckpointer
from torchtune.utils import get_logger

from recipe_utils.embedded.build_once import build_once, changes
from recipe_utils.files import write_atomically

_HF_NAMES = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""Argument of torchtune's builder -> its name in a ``config.json``."""
_FIXED = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
_DEFAULTS = {"rope_base": 500_000, "norm_eps": 1e-5, "tie_word_embeddings": True}
_MADE_FROM = "made_from"
"""The key in the metadata of the weights' file."""

_log = get_logger("INFO")


def fresh_llama_checkpointer(
    model: Mapping[str, Any],
    checkpoint_dir: str,
    output_dir: str,
    seed: int = 0,
    adapter_checkpoint: str | None = None,
    recipe_checkpoint: str | None = None,
    should_load_recipe_state: bool = False,
) -> FullModelHFCheckpointer:
    """A Hugging Face checkpointer over a checkpoint that it first makes from fresh weights.

    The checkpoint is a plain Hugging Face folder (``config.json``, ``model.safetensors``): what is saved
    from it loads with ``transformers``, too. It is made once, and anew where ``model`` or ``seed`` are no
    longer those that it was made from. Weights that something else has put there stay as they are.

    Args:
        model: component of a Llama model, ``torchtune.models.llama3_2.llama3_2`` with
            ``scale_factor: 1`` (plain RoPE), which is what the ``config.json`` describes.
        checkpoint_dir: folder of the fresh checkpoint.
        output_dir: where checkpoints are saved.
        seed: of the weights.
        adapter_checkpoint: passed on.
        recipe_checkpoint: passed on.
        should_load_recipe_state: passed on.

    Raises:
        ValueError: a model that the ``config.json`` would not describe.
    """
    if not model["_component_"].endswith(".llama3_2") or model.get("scale_factor") != 1:
        raise ValueError(
            f"model={model['_component_']}: fresh weights are made for "
            "torchtune.models.llama3_2.llama3_2 with scale_factor=1 only"
        )
    weights = Path(checkpoint_dir) / "model.safetensors"
    described = weights.with_name("config.json")
    hf_config = _hf_config(model)
    made_from = {f"model.{name}": hf_config[_HF_NAMES[name]] for name in _HF_NAMES} | {"seed": seed}

    def is_current() -> bool:
        recorded = _recorded(weights)
        if recorded is None:
            return True
        is_described = described.exists() and json.loads(described.read_text()) == hf_config
        return is_described and not changes(recorded, made_from)

    def build() -> None:
        recorded = _recorded(weights) if weights.exists() else None
        if changed := changes(recorded or {}, made_from):
            _log.info(f"{weights}: fresh weights are made anew, because {changed}")
        state_dict = tune_to_hf(
            fresh_state_dict(config.instantiate(OmegaConf.create(dict(model))), seed),
            num_heads=model["num_heads"],
            num_kv_heads=model["num_kv_heads"],
            dim=model["embed_dim"],
        )
        tensors = {name: tensor.contiguous() for name, tensor in state_dict.items()}
        # The weights first, which hold the record: what a kill leaves half replaced is not taken for current.
        write_atomically(
            weights, save(tensors, {"format": "pt", _MADE_FROM: json.dumps(made_from)})
        )
        write_atomically(described, json.dumps(hf_config, indent=2))

    build_once(weights, build, is_current)
    return FullModelHFCheckpointer(
        checkpoint_dir=checkpoint_dir,
        checkpoint_files=[weights.name],
        model_type="LLAMA3_2",
        output_dir=output_dir,
        adapter_checkpoint=adapter_checkpoint,
        recipe_checkpoint=recipe_checkpoint,
        should_load_recipe_state=should_load_recipe_state,
    )


def fresh_state_dict(model: nn.Module, seed: int) -> dict[str, Any]:
    """Initial weights as GPT-2's (Radford et al. 2019, section 2.3).

    Normal with standard deviation 0.02, projections into the residual stream smaller by the square
    root of their number; norms stay 1.
    """
    num_layers = len(model.layers)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        into_residual = name.endswith(("output_proj.weight", "w2.weight"))
        std = 0.02 / math.sqrt(2 * num_layers) if into_residual else 0.02
        nn.init.normal_(parameter, std=std, generator=generator)
    return model.state_dict()


def _recorded(weights: Path) -> dict[str, Any] | None:
    """Returns the arguments that fresh weights were made from; None for weights of another origin."""
    with safe_open(weights, "pt") as file:
        record = (file.metadata() or {}).get(_MADE_FROM)
    return None if record is None else json.loads(record)


def _hf_config(model: Mapping[str, Any]) -> dict[str, Any]:
    given = {**_DEFAULTS, **model}
    return {
        **_FIXED,
        **{_HF_NAMES[name]: given[name] for name in _HF_NAMES},
        "head_dim": model["embed_dim"] // model["num_heads"],
    }
