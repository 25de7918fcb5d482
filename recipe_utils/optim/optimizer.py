"""Optimizers, including one that steps inside the backward."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchtune import training
from torchtune.training.memory import OptimizerInBackwardWrapper


class OptimizerInBackward(OptimizerInBackwardWrapper):
    """Steps each parameter as soon as its gradient is there, and frees the gradient.

    Nobody calls ``step`` or ``zero_grad``: the loss is scaled before the backward, hence the gradients
    that the hooks see are final. An update step must have a single microbatch, and there is no moment
    at which all gradients exist to be clipped or checked.

    Args:
        model: every parameter gets an optimizer of its own.
        make_optimizer: called with a list of one parameter.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    ) -> None:
        optimizers = {parameter: make_optimizer([parameter]) for parameter in model.parameters()}
        super().__init__({name: optimizers[p] for name, p in model.named_parameters()})
        training.register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optim_map.values() for group in optimizer.param_groups]


def build_lr_scheduler(
    make_lr_scheduler: Callable[..., Any],
    optimizer: Optimizer | OptimizerInBackward,
    num_training_steps: int,
    last_epoch: int,
) -> Any:
    """A learning-rate scheduler over update steps.

    Args:
        make_lr_scheduler: called with an optimizer, ``num_training_steps`` and ``last_epoch``.
        optimizer: all its parameters follow the schedule.
        num_training_steps: update steps of the whole training.
        last_epoch: update steps already done, minus one.
    """
    first = optimizer
    if isinstance(optimizer, OptimizerInBackward):
        first = next(iter(optimizer.optim_map.values()))
    scheduler = make_lr_scheduler(
        first, num_training_steps=num_training_steps, last_epoch=last_epoch
    )
    if isinstance(optimizer, OptimizerInBackward):
        optimizer.set_lr_scheduler(scheduler)  # from here on the others follow the first
        for group in optimizer.param_groups:
            group["lr"] = scheduler.get_last_lr()[0]
    return scheduler


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
        ValueError: it is the state of an optimizer of other parameters.
    """
    names = [name for name, _ in model.named_parameters()]
    if isinstance(optimizer, OptimizerInBackward):
        num_saved = len(state_dict.keys() & names)
    else:
        num_saved = sum(len(group["params"]) for group in state_dict.get("param_groups", ()))
    if num_saved != len(names):
        raise ValueError(
            f"checkpointer.recipe_checkpoint: its optimizer steps {num_saved} of this model's parameters, "
            f"which are {len(names)}; it must be of a full fine-tuning recipe, this model and the same "
            "optimizer_in_bwd"
        )
    if isinstance(optimizer, OptimizerInBackward):
        for name, part in optimizer.optim_map.items():
            training.load_from_full_optimizer_state_dict(model, part, state_dict[name], device)
    else:
        training.load_from_full_optimizer_state_dict(model, optimizer, state_dict, device)
