"""The peers that learn from a teacher besides this project's recipe.

They take the config of ``knowledge_distillation_update_step``.
"""

import runpy
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig
from torch import nn
from torchtune import config as torchtune_config
from torchtune import modules, training
from torchtune.utils import get_device

from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.shared_by_peers import (
    STOCK_RECIPES,
    TakeModel,
    do_nothing,
    gradients_of,
)
from recipe_utils.benchmark.start_adapters import adapters_in, load_adapters


class StockLossLogger(LossLogger):
    """Reports the loss of every peer as torchtune computes it, whose divergence has the teacher's entropy in it.

    Args:
        kd_ratio: the divergence's part in the loss.
    """

    def __init__(self, kd_ratio: float) -> None:
        self._kd_ratio = kd_ratio

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Takes ``payload["loss"]``, with the entropy where it is logged by itself."""
        if "teacher_entropy" in payload:
            entropy = self._kd_ratio * payload["teacher_entropy"]
            payload = {**payload, "loss": payload["loss"] + entropy}
        super().log_dict(payload, step)


def train_stock_distillation(config: DictConfig, take_model: TakeModel) -> None:
    """Torchtune's own recipe on a single device, its update steps untouched.

    It builds students with LoRA only; where the model has no adapters, a whole one is put in their place.

    Args:
        config: its ``loss`` and ``kd_loss`` must be torchtune's. Keys that the stock recipe does not know
            are not read by it.
        take_model: gets this peer's gradients.
    """
    path = STOCK_RECIPES / "knowledge_distillation_single_device.py"
    recipe = runpy.run_path(str(path))["KDRecipeSingleDevice"](config)
    recipe.save_checkpoint = do_nothing
    has_adapters = bool(adapters_in(config).modules)
    if not has_adapters:
        recipe._setup_model = partial(_whole_student, config)
    recipe.setup(config)
    if has_adapters:  # it reads adapters only where it resumes
        load_adapters(recipe._model, config.checkpointer.adapter_checkpoint)
    # It steps a schedule without asking for one.
    recipe._lr_scheduler = recipe._lr_scheduler or SimpleNamespace(step=do_nothing)
    take_model(lambda: gradients_of(recipe._model))
    recipe.train()


def _whole_student(
    config: DictConfig, *, base_model_state_dict: dict[str, Any], **_: Any
) -> nn.Module:
    """A model of which all weights are trained, wrapped as the stock recipe does it."""
    device = get_device(config.device)
    with training.set_default_dtype(training.get_dtype(config.dtype, device=device)), device:
        model: nn.Module = torchtune_config.instantiate(config.model)
    if config.compile:
        training.compile_model(model)
    if config.enable_activation_checkpointing:
        wrapped = {modules.TransformerSelfAttentionLayer}
        training.set_activation_checkpointing(model, auto_wrap_policy=wrapped)
    model.load_state_dict(base_model_state_dict)
    return model
