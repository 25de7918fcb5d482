"""Start from fresh weights instead of a downloaded checkpoint."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import nn
from torchtune import config
from torchtune.models.convert_weights import tune_to_hf
from torchtune.training import FullModelHFCheckpointer

from recipe_utils.embedded.build_once import build_once


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

    The checkpoint is a plain Hugging Face folder (``config.json``, ``model.safetensors``), made once:
    what is saved from it loads with ``transformers``, too.

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

    def build() -> None:
        hf_config = _hf_config(model)
        (Path(checkpoint_dir) / "config.json").write_text(json.dumps(hf_config, indent=2))
        state_dict = tune_to_hf(
            fresh_state_dict(config.instantiate(OmegaConf.create(dict(model))), seed),
            num_heads=model["num_heads"],
            num_kv_heads=model["num_kv_heads"],
            dim=model["embed_dim"],
        )
        unfinished = weights.with_name(".model.unfinished")
        save_file({name: t.contiguous() for name, t in state_dict.items()}, unfinished)
        unfinished.rename(weights)

    build_once(weights, build)
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


def _hf_config(model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model["vocab_size"],
        "hidden_size": model["embed_dim"],
        "intermediate_size": model["intermediate_dim"],
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "head_dim": model["embed_dim"] // model["num_heads"],
        "max_position_embeddings": model["max_seq_len"],
        "rope_theta": float(model.get("rope_base", 500_000)),
        "rms_norm_eps": model.get("norm_eps", 1e-5),
        "tie_word_embeddings": model.get("tie_word_embeddings", True),
        "torch_dtype": "float32",
    }
