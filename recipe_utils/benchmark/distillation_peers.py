"""The peers that learn from a teacher besides this project's recipe.

They take the config of ``knowledge_distillation_update_step``.
"""

import runpy
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torchtune import config as torchtune_config
from torchtune import modules, training
from torchtune.data import padded_collate_sft
from torchtune.utils import get_device

from recipe_utils.benchmark.hugging_face_peers import (
    gradients_by_torchtune_name,
    padding_tokenizer,
    report_loss,
    trainer_arguments,
)
from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.shared_by_peers import (
    IGNORE_INDEX,
    STOCK_RECIPES,
    TakeModel,
    do_nothing,
    gradients_of,
    make_lr_scheduler,
    samples_in_order,
)
from recipe_utils.benchmark.start_adapters import adapters_in, load_adapters
from recipe_utils.data.loader.samples import Sample
from recipe_utils.parallel.process_group import world_size_from_env


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


def train_trl_gkd(config: DictConfig, take_model: TakeModel) -> None:
    """TRL's GKDTrainer on the samples as they are (``lmbda`` 0), both models from their checkpoint folders.

    Samples are tokenized before the first step. Its loss is the divergence alone, without the teacher's
    entropy. With several processes it trains with DDP.

    Args:
        config: ``checkpoint_dir`` of both checkpointers must be a Hugging Face folder.
            ``attn_implementation`` is transformers' (sdpa).
        take_model: gets this peer's gradients.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    tokenizer = torchtune_config.instantiate(config.tokenizer)
    samples = samples_in_order(config, tokenizer, world_size_from_env())
    device = get_device(config.device)

    def load(checkpointer: DictConfig) -> Any:
        torchtune_config.instantiate(checkpointer)  # one of fresh weights writes them
        model = AutoModelForCausalLM.from_pretrained(
            checkpointer.checkpoint_dir,
            dtype=training.get_dtype(config.dtype, device=device),
            attn_implementation=config.get("attn_implementation", "sdpa"),
        )
        return model.to(device)

    model, teacher = load(config.checkpointer), load(config.teacher_checkpointer)
    optimizer = torchtune_config.instantiate(config.optimizer, model.parameters())

    def collate(batch: Sequence[Sample]) -> dict[str, Tensor]:
        renamed = [{"tokens": each["input_ids"], "labels": each["labels"]} for each in batch]
        collated = padded_collate_sft(renamed, tokenizer.pad_id, IGNORE_INDEX)
        lengths = torch.tensor([len(each["input_ids"]) for each in batch])
        is_real = torch.arange(collated["tokens"].shape[1]) < lengths[:, None]
        return {
            "input_ids": collated["tokens"],
            "labels": collated["labels"],
            "attention_mask": is_real.long(),
        }

    class InGivenOrder(GKDTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    take_model(lambda: gradients_by_torchtune_name(model))
    args = GKDConfig(
        **trainer_arguments(config, device),
        lmbda=0.0,
        beta=0.0,  # the forward divergence
        gradient_checkpointing=config.enable_activation_checkpointing,
        max_length=None,  # the config's tokenizer has cut them
        bf16=False,  # no autocast: the models are in the config's precision
    )
    args._n_gpu = min(args.n_gpu, 1)  # or one process would use all GPUs of the machine
    trainer = InGivenOrder(
        model=model,
        teacher_model=teacher,
        args=args,
        data_collator=collate,
        train_dataset=Dataset.from_list(
            [{"input_ids": s["tokens"], "labels": s["labels"]} for s in samples]
        ),
        processing_class=padding_tokenizer(tokenizer.pad_id),
        callbacks=[report_loss()],
        optimizers=(optimizer, make_lr_scheduler(config, optimizer)),
    )
    trainer.train()


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
