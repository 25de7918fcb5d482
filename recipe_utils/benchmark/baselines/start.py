"""Initial weights and adapters of baselines."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from recipe_utils.checkpoint.peft import load_checkpoint
from recipe_utils.examples.fresh_weights import _DEFAULTS, _FIXED, _HF_NAMES
from recipe_utils.models.adapters.lora import Adapters, find_adapters, freeze_base, fresh_adapters
from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.settings import ModelSettings
from recipe_utils.optim.optimizer import unwrapped
from recipe_utils.settings.problems import naming
from recipe_utils.torchtune_names import ADAPTER_KEY, MODEL_KEY, instantiate


def adapters_in(config: Mapping[str, Any]) -> Adapters:
    """Returns the adapters of a config's model; raises ConfigError if it cannot be built."""
    cfg_model = config["model"]
    if isinstance(cfg_model, DictConfig):
        cfg_model = OmegaConf.to_container(cfg_model, resolve=True)
    make_model = partial(instantiate, OmegaConf.create(cfg_model))
    with naming("model"):
        return find_adapters(build_on_meta(make_model, ModelSettings()))


def llama_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``config.json`` of a Llama of torchtune; raises ValueError for another model."""
    if not model["_component_"].endswith(".llama3_2") or model.get("scale_factor") != 1:
        raise ValueError(
            f"model={model['_component_']}: without checkpointer.checkpoint_dir, transformers builds "
            "torchtune.models.llama3_2.llama3_2 with scale_factor=1 only; take out this entry"
        )
    sizes = {hf_name: {**_DEFAULTS, **model}[name] for name, hf_name in _HF_NAMES.items()}
    return {**_FIXED, **sizes, "head_dim": model["embed_dim"] // model["num_heads"]}


def write_fresh_adapters(config: DictConfig) -> None:
    """Writes the adapters that the update-step recipe would draw to ``adapter_checkpoint``."""
    path = Path(config.checkpointer.adapter_checkpoint)
    without = {k: v for k, v in config.checkpointer.items() if k != "adapter_checkpoint"}
    with naming("checkpointer"):
        base = instantiate(OmegaConf.create(without)).load_checkpoint()
    dtype = ModelSettings(dtype=config.dtype).torch_dtype
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(fresh_adapters(adapters_in(config), base[MODEL_KEY], config.seed, dtype), path)


@torch.no_grad()
def load_adapters(model: nn.Module, path: str) -> None:
    """Copies adapters from a file into a model, in place because an optimizer may refer to them."""
    given = torch.load(path, map_location="cpu", weights_only=True)
    for name, parameter in model.named_parameters():
        full = given.pop(unwrapped(name), None)
        if full is None:
            continue
        full = full.to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        parameter.copy_(full)
    if given:
        raise ValueError(f"checkpointer.adapter_checkpoint={path}: the model has no {min(given)}")


def load_start(model: nn.Module, config: DictConfig) -> None:
    """Loads weights and adapters of ``checkpointer`` into an unsharded model; freezes its base."""
    freeze_base(model)
    loaded = load_checkpoint(instantiate(config.checkpointer), config.checkpointer)
    model.load_state_dict({**loaded[MODEL_KEY], **loaded.get(ADAPTER_KEY, {})})
