"""Gradients of single samples by a recipe's own ``sums``: the reference for an objective that is not a stock one.

Update step 1 has samples of 5, 3, 9 and 2 tokens, which the recipe packs into two rows on two ranks and divides by 15
targets. Here the same recipe has one process and four padded microbatches of one sample each; the gradient of each
``sums(microbatch)[0]``, over 15 targets counted sample by sample, is summed. So the recipe's grouping, packing,
counts, scale and synchronization are compared. What ``sums`` computes of a sample is taken as it is.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from recipe_utils.check_gradient.plain import Precision, Step, remove_dropout
from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.models.pipeline.schedule import PipelineSettings
from recipe_utils.parallel.fsdp import local
from recipe_utils.parallel.ranks import RankSettings
from recipe_utils.parallel.to_device import to_device_ahead
from recipe_utils.settings.keys import own_keys
from recipe_utils.settings.problems import ConfigError

_DROPPED = own_keys(RankSettings).keys() | own_keys(PipelineSettings).keys() | {
    "tensor_parallel_plan", "fsdp_cpu_offload", "fsdp_reshard_after_forward", "custom_sharded_layers", "compile",
    "optimizer_in_bwd", "max_tokens_per_microbatch", "max_ranks_per_row", "balance_over_ranks", "packed_attention",
    "enable_activation_checkpointing", "enable_activation_offloading", "ac_mode", "ac_option",
}  # fmt: skip
"""Keys of layouts and rows, which one process with a sample per microbatch does not have."""


def names_of(recipe_class: Any) -> tuple[str, ...]:
    """Returns the names ``SUMS`` in the file of a recipe; ("loss",) without them."""
    return tuple(recipe_class.setup.__globals__.get("SUMS", ("loss",)))


def gradients_of(step: Step, recipe_class: Any, precision: Precision) -> dict[str, Tensor]:
    """Returns the gradient of each trained parameter on the CPU, a backward for each sample.

    Raises ConfigError if the recipe has no ``divisor``, the name of the count that its sums are divided by.
    """
    kept = {key: value for key, value in step.cfg.items() if key not in _DROPPED}
    kept |= {"device": precision.device.type, "dtype": precision.forward, "weights_dtype": precision.sums}
    cfg = OmegaConf.create({**kept, "microbatching": "in_order", "batch_size": 1})
    with _one_process():
        recipe = recipe_class(cfg)
        with recipe.run:
            recipe.setup(cfg)
            if not hasattr(recipe, "divisor"):
                text = "set self.divisor in setup to the name of the count that sums are divided by"
                raise ConfigError(f"check_gradient: {text}")
            remove_dropout(recipe.model)
            parameters = parameters_by_name(recipe.model)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    local(parameter).copy_(step.weights[name])
            with recipe.loader.epoch(0) as steps:
                single = next(iter(steps))
            if hasattr(recipe, "by_sample"):
                recipe.by_sample.start(single, recipe.loader, 0)  # weights of named datasets
            total = sum(microbatch.counts[recipe.divisor] for microbatch in single.microbatches)
            for microbatch in to_device_ahead(single.microbatches, recipe.ranks.device):
                (recipe.sums(microbatch)[0] / total).backward()
            grads = {name: parameter.grad for name, parameter in parameters.items()}
    return {name: torch.zeros_like(step.weights[name]) if g is None else local(g).cpu() for name, g in grads.items()}


@contextmanager
def _one_process() -> Iterator[None]:
    """Hides the launcher's other ranks, and what setup logs again."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    hidden = {name: os.environ.pop(name) for name in launcher & os.environ.keys()}
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        os.environ.update(hidden)
        logging.disable(logging.NOTSET)
