"""Checkpoints of fresh weights, for training without a download."""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import save
from torch import nn
from torchtune.models.convert_weights import tune_to_hf
from torchtune.training import FullModelHFCheckpointer

from recipe_utils.examples.build_once import WEIGHTS, build_once
from recipe_utils.files import write_atomically
from recipe_utils.torchtune_names import instantiate

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
"""Argument of torchtune's builder -> name in ``config.json``."""
_FIXED = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
_DEFAULTS = {"rope_base": 500_000, "norm_eps": 1e-5, "tie_word_embeddings": True}
_MADE_FROM = "made_from"
"""Key in the metadata of the weights file."""


def fresh_llama_checkpointer(
    model: Mapping[str, Any],
    checkpoint_dir: str,
    output_dir: str,
    seed: int = 0,
    adapter_checkpoint: str | None = None,
    recipe_checkpoint: str | None = None,
    should_load_recipe_state: bool = False,
    train: Callable[[nn.Module], None] | None = None,
    trained_on: Mapping[str, Any] | None = None,
) -> FullModelHFCheckpointer:
    """Returns a Hugging Face checkpointer, after building a checkpoint of fresh weights.

    The checkpoint (``config.json``, ``model.safetensors``) also loads with ``transformers``. It is built once, and
    rebuilt if ``model`` or ``seed`` change. Weights of another origin are not replaced.

    ``model`` is ``torchtune.models.llama3_2.llama3_2`` with ``scale_factor: 1`` (plain RoPE). The
    fresh checkpoint is in ``checkpoint_dir``. ``train`` changes the fresh model before it is saved, which is repeated
    if ``trained_on`` changes. Other arguments are those of the checkpointer. Raises ValueError if
    ``config.json`` cannot describe the model, or another model is in ``checkpoint_dir``.
    """
    if not model["_component_"].endswith(".llama3_2") or model.get("scale_factor") != 1:
        raise ValueError(
            f"model={model['_component_']}: fresh weights are made for "
            "torchtune.models.llama3_2.llama3_2 with scale_factor=1 only"
        )
    weights = Path(checkpoint_dir) / "model.safetensors"
    given = {**_DEFAULTS, **model}
    sizes = {hf_name: given[name] for name, hf_name in _HF_NAMES.items()}
    hf_config = {**_FIXED, **sizes, "head_dim": model["embed_dim"] // model["num_heads"]}
    # Recorded in the file, by which another size or seed is noticed.
    made_from = {f"model.{name}": given[name] for name in _HF_NAMES} | {"seed": seed} | {**(trained_on or {})}

    def build() -> None:
        # No weight depends on max_seq_len, which may be too large for the tables of positions.
        shorter = {"max_seq_len": 1} if train is None else {}
        module = instantiate(OmegaConf.create({**model, **shorter}))
        fresh_state_dict(module, seed)
        if train is not None:
            train(module)
        state_dict = tune_to_hf(
            module.state_dict(),
            num_heads=model["num_heads"],
            num_kv_heads=model["num_kv_heads"],
            dim=model["embed_dim"],
        )
        tensors = {name: tensor.contiguous() for name, tensor in state_dict.items()}
        write_atomically(weights.with_name("config.json"), json.dumps(hf_config, indent=2))
        metadata = {"format": "pt", _MADE_FROM: json.dumps(made_from)}
        write_atomically(weights, save(tensors, metadata))

    def is_of_another_model(file: Path) -> bool:
        if file.name == "config.json":  # a build that was killed leaves one, perhaps of other sizes
            return re.findall(r'^  "(\w+)":', file.read_text(errors="replace"), re.MULTILINE) != [*hf_config]
        return WEIGHTS.fullmatch(file.name) is not None

    build_once(weights, build, made_from, lambda: _recorded(weights), is_of_another_model)
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
    """Returns initial weights as GPT-2's (Radford et al. 2019, section 2.3).

    Weights are normal with standard deviation 0.02, divided by the square root of their number for
    projections into the residual stream. Norms are 1.
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
    """Returns the arguments of fresh weights; None for weights of another origin."""
    try:
        with safe_open(weights, "np") as file:  # torch would open it a second time
            record = (file.metadata() or {}).get(_MADE_FROM)
    except FileNotFoundError:
        return None
    return None if record is None else json.loads(record)
