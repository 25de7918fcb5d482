"""Recipe states saved by torchtune's stock recipes, at epoch ends."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchtune import training

from recipe_utils.checkpoint.peft import DESCRIPTION
from recipe_utils.checkpoint.tensors import unwrapped
from recipe_utils.optim.optimizer import OptimizerInBackward, trained_parameters
from recipe_utils.settings.problems import ConfigError


def finds_stock_state(cfg_checkpointer: Mapping[str, Any]) -> bool:
    """Returns True if a checkpointer with this config would find a recipe state to load."""
    default = Path(str(cfg_checkpointer.get("output_dir")), "recipe_state", "recipe_state.pt")
    return cfg_checkpointer.get("recipe_checkpoint") is not None or default.exists()


def load_checkpoint(checkpointer: Any, cfg_checkpointer: Mapping[str, Any]) -> dict[str, Any]:
    """Loads a checkpoint, with the adapters of ``adapter_checkpoint`` even if nothing is resumed.

    torchtune's checkpointers read ``adapter_checkpoint`` only with a recipe state. Files beside it
    describe the training: ``lora_alpha`` and ``frozen``, fingerprints of its base. Raises ValueError
    if the file is missing or unreadable.
    """
    loaded: dict[str, Any] = checkpointer.load_checkpoint()
    name = cfg_checkpointer.get("adapter_checkpoint")
    if name is None or training.ADAPTER_KEY in loaded:
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
    return {**loaded, training.ADAPTER_KEY: adapters, training.ADAPTER_CONFIG: described}


def check_stock_state(saved: Mapping[str, Any]) -> None:
    """Raises ConfigError, naming the missing keys, if a state was not saved by a fine-tuning recipe."""
    needed = {training.OPT_KEY, training.SEED_KEY, training.MAX_STEPS_KEY, training.EPOCHS_KEY}
    if needed - saved.keys():
        raise ConfigError(
            f"checkpointer.recipe_checkpoint: it has no {', '.join(sorted(needed - saved.keys()))}; "
            "it must be of a full or LoRA fine-tuning recipe"
        )


def load_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer | OptimizerInBackward,
    state_dict: dict[str, Any],
    device: torch.device,
) -> None:
    """Loads a full (unsharded) optimizer state, as torchtune's recipes save it.

    ``model`` may be sharded. For :class:`OptimizerInBackward`, ``state_dict`` has one state per
    parameter name. Raises ConfigError if the state is that of other parameters.
    """
    trained = trained_parameters(model)
    if isinstance(optimizer, OptimizerInBackward):
        num_saved = len(state_dict.keys() & trained.keys())
    else:
        state_dict = _of_trained(state_dict, model)
        num_saved = sum(len(group["params"]) for group in state_dict.get("param_groups", ()))
    if num_saved != len(trained):
        raise ConfigError(
            f"checkpointer.recipe_checkpoint: its optimizer steps {num_saved} of this model's parameters, "
            f"which are {len(trained)}; it must be of a full or LoRA fine-tuning recipe, this model and the "
            "same optimizer_in_bwd"
        )
    if isinstance(optimizer, OptimizerInBackward):
        for name, part in optimizer.optim_map.items():
            training.load_from_full_optimizer_state_dict(model, part, state_dict[name], device)
    else:
        training.load_from_full_optimizer_state_dict(model, optimizer, state_dict, device)


def _of_trained(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Returns the state by parameter name, without frozen parameters.

    Stock LoRA recipes pass frozen parameters to the optimizer, too. The single-device recipe
    numbers parameters.
    """
    parameters = {unwrapped(name): p.requires_grad for name, p in model.named_parameters()}
    groups = state_dict.get("param_groups", ())
    if len(groups) != 1 or len(groups[0]["params"]) != len(parameters):
        return state_dict
    saved = groups[0]["params"]
    is_numbered = any(isinstance(key, int) for key in saved)
    names = dict(zip(saved, parameters if is_numbered else saved, strict=True))
    return {
        "state": {
            names[key]: state
            for key, state in state_dict["state"].items()
            if parameters[names[key]]
        },
        "param_groups": [{**groups[0], "params": [n for n in names.values() if parameters[n]]}],
    }
