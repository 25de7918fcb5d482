"""The peers: one function per kind, each trains as the config says, in a process of its own.

All of them take the same config, that of the update-step recipe, and read from it the same model,
weights, data order, update steps and optimizer. Each hands a function that returns its gradients to
``take_model`` once its model exists, and reports losses to a :class:`LossLogger`.
"""

import importlib.util
import runpy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torchtune import config as torchtune_config
from torchtune import training
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient
from torchtune.utils import get_device

from recipe_utils.benchmark.distillation_peers import train_stock_distillation, train_trl_gkd
from recipe_utils.benchmark.hugging_face_peers import train_hf_trainer, train_trl
from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.pair_peers import train_limit_dpo, train_stock_dpo, train_trl_dpo
from recipe_utils.benchmark.shared_by_peers import (
    STOCK_RECIPES,
    BareModel,
    TakeModel,
    do_nothing,
    gradients_of,
    let_stock_recipe_run_on_cpu,
    make_lr_scheduler,
    row_of,
    samples_in_order,
)
from recipe_utils.benchmark.start_adapters import adapters_in, load_adapters
from recipe_utils.data.loader.samples import Sample
from recipe_utils.model.adapters.adapters import Adapters
from recipe_utils.tune.registry import recipe_path

STOCK_LOSS = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
STOCK_KD_LOSS = {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"}
# Of what is trained: (file, class) on a single device and on several.
STOCK_FULL = (
    ("full_finetune_single_device.py", "FullFinetuneRecipeSingleDevice"),
    ("full_finetune_distributed.py", "FullFinetuneRecipeDistributed"),
)
STOCK_LORA = (
    ("lora_finetune_single_device.py", "LoRAFinetuneRecipeSingleDevice"),
    ("lora_finetune_distributed.py", "LoRAFinetuneRecipeDistributed"),
)
CLASSES = {
    "full_finetune_update_step": "FullFinetuneRecipe",
    "full_dpo_update_step": "FullDPORecipe",
    "knowledge_distillation_update_step": "KDRecipe",
}
"""The update-step recipes of which peers can be compared: of text, of pairs of answers, and with a teacher."""
TEXT, PAIRS, DISTILLATION = CLASSES


def train_stock(config: DictConfig, take_model: TakeModel) -> None:
    """Torchtune's own recipe: single device, or FSDP2 where there is more than one process.

    That for LoRA if the model has adapters.

    Args:
        config: its ``loss`` must be one of torchtune's. Keys that the stock recipes do not know are
            not read by them.
        take_model: gets this peer's gradients.
    """
    _never_save_checkpoints()
    has_adapters = bool(adapters_in(config).modules)
    is_distributed = training.is_distributed()
    if is_distributed:
        device = get_device(config.device)
        let_stock_recipe_run_on_cpu(device)
        if has_adapters:  # the other recipe does so itself, of this one its entry point does
            on_accelerator = device.type != "cpu"
            dist.init_process_group(training.get_distributed_backend(device.type, on_accelerator))
    path, name = (STOCK_LORA if has_adapters else STOCK_FULL)[is_distributed]
    recipe = runpy.run_path(str(STOCK_RECIPES / path))[name](config)
    recipe.save_checkpoint = do_nothing  # what the single-device recipes call
    recipe.setup(config)
    if has_adapters:
        # It reads adapters only where it resumes, and steps a schedule without asking for one.
        load_adapters(recipe._model, config.checkpointer.adapter_checkpoint)
        recipe._lr_scheduler = recipe._lr_scheduler or SimpleNamespace(step=do_nothing)
    take_model(lambda: gradients_of(recipe._model))
    recipe.train()


def train_update_step(name: str, config: DictConfig, take_model: TakeModel) -> None:
    """This project's recipe; it saves checkpoints where its own ``save_every_n_steps`` says so.

    Args:
        name: a key of :data:`CLASSES`.
        config: of the recipe.
        take_model: gets this peer's gradients.
    """
    recipe = runpy.run_path(str(recipe_path(name)))[CLASSES[name]](config)
    recipe.run.export = do_nothing
    if config.get("save_every_n_steps") is None:
        recipe.run.save = do_nothing
    with recipe.run:
        recipe.setup(config)
        take_model(lambda: gradients_of(recipe.model))
        recipe.train()


def train_limit(config: DictConfig, take_model: TakeModel) -> None:
    """A bare loop that computes nothing but what an update step needs: the limit of what can be won.

    All samples of the update step stand in one row without any padding, each attends to itself alone,
    and only target positions are projected onto the vocabulary. Samples are tokenized before the first
    step. It shares neither the loss nor the plan with the update-step recipe. It leaves out what a
    recipe does besides: no ranks, no compiling, no activation checkpointing.

    Args:
        config: the key ``max_tokens_per_row`` cuts the update step into several rows [tokens].
        take_model: gets this peer's gradients.

    Raises:
        ValueError: a model other than torchtune's ``TransformerDecoder``.
    """
    bare = BareModel(config)
    optimizer = torchtune_config.instantiate(config.optimizer, bare.model.parameters())
    lr_scheduler = make_lr_scheduler(config, optimizer)
    take_model(lambda: gradients_of(bare.model))
    tokenizer = torchtune_config.instantiate(config.tokenizer)
    samples = samples_in_order(config, tokenizer, num_ranks=1)
    logger = LossLogger()
    batch_size = config.batch_size * config.gradient_accumulation_steps
    for start in range(0, len(samples), batch_size):
        step = samples[start : start + batch_size]
        rows = [row_of(row) for row in _rows(step, config.get("max_tokens_per_row"))]
        num_targets = sum(len(row.labels) for row in rows)
        loss_of_step = torch.zeros((), device=get_device(config.device))
        for row in rows:
            loss = -bare.log_probs(row).sum() / num_targets
            loss.backward()
            loss_of_step += loss.detach()
        if config.get("clip_grad_norm") is not None:
            nn.utils.clip_grad_norm_(bare.model.parameters(), float(config.clip_grad_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if lr_scheduler is not None:
            lr_scheduler.step()
        logger.log("loss", loss_of_step.item(), start // batch_size + 1)


KINDS: dict[str, dict[str, Callable[[DictConfig, TakeModel], None]]] = {
    TEXT: {
        "stock": train_stock,
        "update_step": partial(train_update_step, TEXT),
        "hf_trainer": train_hf_trainer,
        "trl": train_trl,
        "limit": train_limit,
    },
    PAIRS: {
        "stock": train_stock_dpo,
        "update_step": partial(train_update_step, PAIRS),
        "trl": train_trl_dpo,
        "limit": train_limit_dpo,
    },
    DISTILLATION: {
        "stock": train_stock_distillation,
        "update_step": partial(train_update_step, DISTILLATION),
        "trl": train_trl_gkd,
    },
}
"""Of each recipe, what trains as a peer of each kind."""
OWN_KEYS: dict[str, dict[str, set[str]]] = {
    TEXT: {
        "hf_trainer": {"train_sampling_strategy"},
        "trl": {"padding_free", "attn_implementation"},
        "limit": {"max_tokens_per_row"},
    },
    PAIRS: {
        "trl": {"precompute_ref_log_probs", "attn_implementation"},
        "limit": {"pairs_per_row"},
    },
    DISTILLATION: {"trl": {"attn_implementation"}},
}
"""Config keys of a kind that no other one has."""


NEEDS: dict[str, tuple[str, ...]] = {
    "hf_trainer": ("transformers", "accelerate"),
    "trl": ("transformers", "accelerate", "peft", "trl"),
}
"""Packages of a kind that no other one needs."""


def why_skipped(
    recipe: str,
    kind: str,
    num_ranks: int,
    is_packed: bool,
    adapters: Adapters,
    kd_ratio: float,
) -> str | None:
    """Why a peer of this kind cannot run here; None if it can.

    Args:
        recipe: a key of :data:`KINDS`.
        kind: one of its keys.
        num_ranks: processes that it shall run as.
        is_packed: whether the dataset packs its samples.
        adapters: of its model.
        kd_ratio: of its loss, where it has a teacher.
    """
    if kind in ("hf_trainer", "trl", "limit") and is_packed:
        return "reads no packed dataset"
    has_one_process = kind == "limit" or (recipe == DISTILLATION and kind == "stock")
    if has_one_process and num_ranks > 1:
        return "runs as one process only"
    if kind == "hf_trainer" and adapters.modules:
        return "trains no adapters, which kind=trl does"
    if recipe == PAIRS and kind != "update_step" and adapters.modules:
        return "trains no adapters on pairs"
    if recipe == DISTILLATION and kind == "trl" and adapters.modules:
        return "trains no adapters with a teacher"
    if recipe == DISTILLATION and kind == "trl" and kd_ratio != 1:
        return "computes no cross-entropy; set kd_ratio=1"
    if recipe == TEXT and kind == "trl" and not adapters.modules:
        return "trains adapters only; kind=hf_trainer trains whole models"
    if kind in ("trl", "limit") and any(adapters.frozen.values()):
        return "keeps no base in torchao's NF4"
    missing = [package for package in NEEDS.get(kind, ()) if not importlib.util.find_spec(package)]
    if missing:
        return f"{' and '.join(missing)} not installed (pip install {' '.join(missing)})"
    return None


def _rows(samples: Sequence[Sample], max_tokens_per_row: int | None) -> Iterator[list[Sample]]:
    """Consecutive samples of at most ``max_tokens_per_row`` tokens, or a single longer one."""
    row: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        length = len(sample["tokens"])
        if row and max_tokens_per_row is not None and num_tokens + length > max_tokens_per_row:
            yield row
            row, num_tokens = [], 0
        row.append(sample)
        num_tokens += length
    yield row


def _never_save_checkpoints() -> None:
    """A benchmark ends before its epoch does, and measuring gradients needs no checkpoint."""
    CheckpointClient.save_checkpoint = do_nothing
