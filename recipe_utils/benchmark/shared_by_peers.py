"""What peers of every kind need: the samples in their order, the schedule, and the gradients that they hand over."""

from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtune import config as torchtune_config

from recipe_utils.checkpoint.tensors import unwrapped
from recipe_utils.data.sampler import epoch_permutation
from recipe_utils.data.samples import Sample, load_dataset

Gradients = Callable[[], dict[str, Tensor]]
"""Returns the full gradient of each parameter, by its name in torchtune's model. On every rank."""
TakeModel = Callable[[Gradients], None]

IGNORE_INDEX = -100


def samples_in_order(config: DictConfig, tokenizer: Any, num_ranks: int) -> list[Sample]:
    """The samples of the first epoch in the order in which the recipes visit them.

    Args:
        config: of a peer; the samples of ``max_steps_per_epoch`` update steps on all ranks are taken,
            those of the whole epoch if that is None.
        tokenizer: the config's.
        num_ranks: processes of the peer.
    """
    dataset = load_dataset(config.dataset, tokenizer)
    order = epoch_permutation(len(dataset), epoch=0, shuffle=config.get("shuffle", True))
    if config.max_steps_per_epoch is not None:
        per_step = config.batch_size * config.gradient_accumulation_steps * num_ranks
        order = order[: config.max_steps_per_epoch * per_step]
    return [dataset[i] for i in order.tolist()]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The full gradient of each parameter that has one, by its name without wrappers. All ranks together."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            gradients[unwrapped(name)] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return gradients


def make_lr_scheduler(config: DictConfig, optimizer: torch.optim.Optimizer) -> Any:
    """The schedule that the recipes follow over ``max_steps_per_epoch`` update steps, or None."""
    return torchtune_config.instantiate(
        config.get("lr_scheduler"),
        optimizer,
        num_training_steps=config.max_steps_per_epoch,
        last_epoch=-1,
    )
