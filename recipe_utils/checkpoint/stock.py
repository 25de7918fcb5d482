"""Recipe states that torchtune's stock recipes have saved, at epoch ends."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchtune import training

from recipe_utils.optim.optimizer import OptimizerInBackward
from recipe_utils.settings import ConfigError


def finds_stock_state(cfg_checkpointer: Mapping[str, Any]) -> bool:
    """Whether a checkpointer, by its config, would find a recipe state to load."""
    default = Path(str(cfg_checkpointer.get("output_dir")), "recipe_state", "recipe_state.pt")
    return cfg_checkpointer.get("recipe_checkpoint") is not None or default.exists()


def check_stock_state(saved: Mapping[str, Any]) -> None:
    """Refuses a state that is not of a full fine-tuning recipe.

    Raises:
        recipe_utils.settings.ConfigError: names what it has not.
    """
    needed = {training.OPT_KEY, training.SEED_KEY, training.MAX_STEPS_KEY, training.EPOCHS_KEY}
    if needed - saved.keys():
        raise ConfigError(
            f"checkpointer.recipe_checkpoint: it has no {', '.join(sorted(needed - saved.keys()))}; "
            "it must be of a full fine-tuning recipe"
        )


def load_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer | OptimizerInBackward,
    state_dict: dict[str, Any],
    device: torch.device,
) -> None:
    """Loads a full (unsharded) optimizer state, as torchtune's recipes save it.

    Args:
        model: the optimizer's parameters, sharded or not.
        optimizer: of the kind that was saved.
        state_dict: for :class:`OptimizerInBackward` one state per parameter name.
        device: of the model.

    Raises:
        recipe_utils.settings.ConfigError: it is the state of an optimizer of other parameters.
    """
    names = [name for name, _ in model.named_parameters()]
    if isinstance(optimizer, OptimizerInBackward):
        num_saved = len(state_dict.keys() & names)
    else:
        num_saved = sum(len(group["params"]) for group in state_dict.get("param_groups", ()))
    if num_saved != len(names):
        raise ConfigError(
            f"checkpointer.recipe_checkpoint: its optimizer steps {num_saved} of this model's parameters, "
            f"which are {len(names)}; it must be of a full fine-tuning recipe, this model and the same "
            "optimizer_in_bwd"
        )
    if isinstance(optimizer, OptimizerInBackward):
        for name, part in optimizer.optim_map.items():
            training.load_from_full_optimizer_state_dict(model, part, state_dict[name], device)
    else:
        training.load_from_full_optimizer_state_dict(model, optimizer, state_dict, device)
