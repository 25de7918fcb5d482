"""The adapters that all peers of a benchmark start from, and how each of them gets them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchao.dtypes.nf4tensor import to_nf4
from torchtune import config as torchtune_config
from torchtune import training

from recipe_utils.checkpoint.stock import load_checkpoint
from recipe_utils.checkpoint.tensors import unwrapped
from recipe_utils.model.adapters.adapters import (
    Adapters,
    find_adapters,
    freeze_base,
    fresh_adapters,
)
from recipe_utils.model.build.build import ModelSettings, build_on_meta
from recipe_utils.settings.components import MadeWith, check_component
from recipe_utils.settings.problems import ConfigError, naming


def adapters_in(config: Mapping[str, Any]) -> Adapters:
    """What of a config's model is trained and what is not. No weight is allocated.

    Args:
        config: of a recipe.

    Raises:
        recipe_utils.settings.problems.ConfigError: a model that cannot be built.
    """
    cfg_model = config["model"]
    if isinstance(cfg_model, DictConfig):
        cfg_model = OmegaConf.to_container(cfg_model, resolve=True)
    if problems := list(check_component("model", cfg_model, MadeWith())):
        raise ConfigError(*problems)
    make_model = partial(torchtune_config.instantiate, OmegaConf.create(cfg_model))
    with naming("model"):
        return find_adapters(build_on_meta(make_model, ModelSettings()))


def write_fresh_adapters(config: DictConfig, change: float = 0.0) -> None:
    """Writes a config's ``checkpointer.adapter_checkpoint``: the adapters that this project's recipe would draw.

    Args:
        config: of a peer.
        change: standard deviation of what is added to B, and of the factors that magnitudes are
            multiplied with around 1. Without it the model with adapters is the one without.

    Raises:
        recipe_utils.settings.problems.ConfigError: the weights cannot be read.
    """
    path = Path(config.checkpointer.adapter_checkpoint)
    without = {k: v for k, v in config.checkpointer.items() if k != "adapter_checkpoint"}
    with naming("checkpointer"):
        base = torchtune_config.instantiate(OmegaConf.create(without)).load_checkpoint()
    dtype = ModelSettings(config.dtype).torch_dtype
    adapters = adapters_in(config)
    fresh = fresh_adapters(adapters, base[training.MODEL_KEY], config.seed, dtype)
    generator = torch.Generator().manual_seed(config.seed)
    for name, tensor in fresh.items():
        noise = change * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if name.endswith("lora_b.weight"):
            tensor += noise
        elif name.endswith("magnitude"):
            tensor *= 1 + noise
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(fresh, path)


@torch.no_grad()
def load_adapters(model: nn.Module, path: str) -> None:
    """Copies adapters from a file into a model's, in place: an optimizer may hold them already.

    Args:
        model: wrapped and sharded or not; all ranks together.
        path: of tensors by parameter name.
    """
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


def load_start(model: nn.Module, config: DictConfig, rounded_to: torch.dtype | None = None) -> None:
    """Loads a whole model's weights and adapters, and freezes what is not trained.

    Args:
        model: as its builder made it, without NF4.
        config: of a peer.
        rounded_to: a precision that the weights go through, and NF4 where the builder would have made it;
            None takes them as they are.
    """
    freeze_base(model)
    quantised = find_adapters(model).frozen
    checkpointer = torchtune_config.instantiate(config.checkpointer)
    loaded = load_checkpoint(checkpointer, config.checkpointer)
    weights = {**loaded[training.MODEL_KEY], **loaded.get(training.ADAPTER_KEY, {})}
    if rounded_to is not None:
        for name, weight in weights.items():
            weights[name] = weight.to(rounded_to)
            if quantised.get(name):
                weights[name] = to_nf4(weights[name]).get_original_weight()
    model.load_state_dict(weights)
