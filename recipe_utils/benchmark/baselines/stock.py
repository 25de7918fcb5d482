"""torchtune's recipes as baselines. They ignore other keys of the config."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtune
from omegaconf import DictConfig
from torch import nn
from torchtune import config as torchtune_config
from torchtune import modules, training
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient
from torchtune.utils import get_device

from recipe_utils.benchmark.baselines.start import adapters_in, load_adapters
from recipe_utils.benchmark.baselines.update_step import do_nothing

_RECIPES = Path(torchtune.__file__).parents[1] / "recipes"


def train(config: DictConfig) -> None:
    """Fine-tunes with the LoRA recipe if the model has adapters; FSDP2 on several processes."""
    is_distributed = training.is_distributed()
    has_adapters = bool(adapters_in(config).modules)
    if is_distributed:
        let_stock_recipe_run_on_cpu(get_device(config.device))
        if has_adapters:  # in its entry point; the full recipe initializes it itself
            _init_process_group(config)
    file, name = ("lora", "LoRA") if has_adapters else ("full", "Full")
    file += "_finetune_distributed" if is_distributed else "_finetune_single_device"
    name += "FinetuneRecipeDistributed" if is_distributed else "FinetuneRecipeSingleDevice"
    _run(_recipe(file, name, config), config, has_adapters)


def train_dpo(config: DictConfig) -> None:
    """Tunes preferences with FSDP2; torchtune has no single-device recipe for it."""
    let_stock_recipe_run_on_cpu(get_device(config.device))
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    _init_process_group(config, **({} if training.is_distributed() else alone))
    config.ref_checkpointer = config.get("ref_checkpointer") or config.checkpointer
    _run(_recipe("full_dpo_distributed", "FullDPORecipeDistributed", config), config, has_adapters=False)


def train_distillation(config: DictConfig) -> None:
    """Distills on one device. Without adapters, replaces the recipe's LoRA student."""
    recipe = _recipe("knowledge_distillation_single_device", "KDRecipeSingleDevice", config)
    has_adapters = bool(adapters_in(config).modules)
    if not has_adapters:

        def whole_student(*, base_model_state_dict: dict[str, Any], **_: Any) -> nn.Module:
            device = get_device(config.device)
            with training.set_default_dtype(training.get_dtype(config.dtype, device=device)), device:
                model: nn.Module = torchtune_config.instantiate(config.model)
            if config.compile:
                training.compile_model(model)
            if config.enable_activation_checkpointing:
                training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
            model.load_state_dict(base_model_state_dict)
            return model

        recipe._setup_model = whole_student
    _run(recipe, config, has_adapters)


def let_stock_recipe_run_on_cpu(device: torch.device) -> None:
    """Disables memory statistics of torchtune 0.6.1's distributed recipes, which fail on CPU."""
    if device.type == "cpu":
        training.get_memory_stats = do_nothing
        training.log_memory_stats = do_nothing
        training.cleanup_before_training = do_nothing


def _recipe(file: str, name: str, config: DictConfig) -> Any:
    """Builds a recipe without checkpoints."""
    CheckpointClient.save_checkpoint = do_nothing
    recipe = runpy.run_path(str(_RECIPES / f"{file}.py"))[name](config)
    recipe.save_checkpoint = do_nothing  # called by single-device recipes
    return recipe


def _run(stock_recipe: Any, config: DictConfig, has_adapters: bool) -> None:
    stock_recipe.setup(config)
    if has_adapters:  # stock recipes load adapters only to resume
        load_adapters(stock_recipe._model, config.checkpointer.adapter_checkpoint)
    # Some recipes step a schedule that may be None.
    stock_recipe._lr_scheduler = stock_recipe._lr_scheduler or SimpleNamespace(step=do_nothing)
    stock_recipe.train()


def _init_process_group(config: DictConfig, **options: Any) -> None:
    device = get_device(config.device)
    backend = training.get_distributed_backend(device.type, offload_ops_to_cpu=device.type != "cpu")
    dist.init_process_group(backend, **options)
