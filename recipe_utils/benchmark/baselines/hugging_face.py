"""Hugging Face's Trainer as a baseline, with DDP on several processes.

It uses the weights and optimizer of the config and the samples in the recipes' order, tokenized before the first step.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torchtune import config as torchtune_config
from torchtune import training
from torchtune.data import padded_collate_sft
from torchtune.models.convert_weights import tune_to_hf
from torchtune.utils import get_device
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import TrainerCallback

from recipe_utils.benchmark.baselines.start import llama_config
from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.token_audit import dataset_in_order
from recipe_utils.checkpoint.transformers import auto_class_of
from recipe_utils.optim.optimizer import make_schedule
from recipe_utils.parallel.process_group import world_size_from_env
from recipe_utils.text.images.sample import ImageInputs
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.samples import Sample


class ReportLoss(TrainerCallback):
    """Passes each logged loss of rank 0 to the benchmark."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Passes on ``logs["loss"]``."""
        if state.is_world_process_zero:
            LossLogger().log_dict(logs, state.global_step)


def train_hf_trainer(config: DictConfig) -> None:
    """Trains with transformers' Trainer, without attention mask: only padding follows a sample.

    ``train_sampling_strategy`` is ``sequential`` or ``batch_rebalance``, which sorts and splits the
    samples of each update step.
    """

    class InGivenOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            sampler: Any = super()._get_train_sampler(*args)
            sampler.shuffle = False  # batch_rebalance would make update steps of other samples
            return sampler

    tokenizer = torchtune_config.instantiate(config.tokenizer)
    samples: Any = dataset_in_order(config, tokenizer, world_size_from_env())
    # Images are opened and processed while it trains, as by a collator of its users, and beside it as for the recipes.
    has_images = "image_inputs" in samples[0]
    if not has_images:
        samples = [{**each, "input_ids": each["tokens"]} for each in samples]
    is_on_cpu = get_device(config.device).type == "cpu"
    args = TrainingArguments(
        per_device_train_batch_size=config.batch_size,
        dataloader_num_workers=config.num_workers if has_images else 0,
        train_sampling_strategy=config.get("train_sampling_strategy", "sequential"),
        ddp_backend="gloo" if training.is_distributed() and is_on_cpu else None,
        **trainer_arguments(config),
    )
    args._n_gpu = min(args.n_gpu, 1)  # one process would use all GPUs of the machine
    InGivenOrder(
        args=args,
        train_dataset=samples,
        data_collator=partial(_collate, tokenizer.pad_id),
        **what_is_trained(config),
    ).train()


def what_is_trained(config: DictConfig) -> dict[str, Any]:
    """Returns a trainer's model, optimizer and callbacks."""
    model = load_model(config, get_device(config.device))
    optimizer = torchtune_config.instantiate(config.optimizer, model.parameters())
    schedule = make_schedule(config.get("lr_scheduler"), optimizer, config.max_steps_per_epoch)
    return {"model": model, "optimizers": (optimizer, schedule), "callbacks": [ReportLoss()]}


def trainer_arguments(config: DictConfig) -> dict[str, Any]:
    """Returns the arguments of a trainer that trains in the dtype of the config, and logs each loss."""
    return {
        "output_dir": config.output_dir,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "max_steps": config.max_steps_per_epoch,
        "lr_scheduler_type": "constant",
        "max_grad_norm": config.get("clip_grad_norm") or 0.0,
        "gradient_checkpointing": config.enable_activation_checkpointing,
        "remove_unused_columns": False,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,  # no autocast: the model has the precision of the config
        "use_cpu": get_device(config.device).type == "cpu",
        "disable_tqdm": True,
    }


def load_model(config: DictConfig, device: torch.device) -> Any:
    """Returns the model of a checkpoint's folder, or a Llama with the weights of a checkpointer without a folder."""
    dtype = training.get_dtype(config.dtype, device=device)
    checkpointer = torchtune_config.instantiate(config.checkpointer)  # one of fresh weights writes them
    if (folder := config.checkpointer.get("checkpoint_dir")) is not None:
        described = AutoConfig.from_pretrained(folder, local_files_only=True)
        auto_class = auto_class_of(described, images=config.model.get("images", False))
        return auto_class.from_pretrained(folder, dtype=dtype).to(device)
    hf_config = LlamaConfig.from_dict(llama_config(config.model))
    with device:
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    weights = tune_to_hf(
        checkpointer.load_checkpoint()[training.MODEL_KEY],
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        dim=hf_config.hidden_size,
    )
    if hf_config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def tokenizer_of_numbers(model: Any, config: DictConfig) -> PreTrainedTokenizerFast:
    """Returns the tokenizer that TRL requires, also of data that are tokens already."""
    numbers = Tokenizer(WordLevel({str(i): i for i in range(model.config.vocab_size)}, unk_token="0"))
    pad = str(torchtune_config.instantiate(config.tokenizer).pad_id)
    return PreTrainedTokenizerFast(tokenizer_object=numbers, pad_token=pad, eos_token=pad)


def _collate(pad_id: int, batch: Sequence[Sample]) -> Mapping[str, Tensor]:
    padded = padded_collate_sft(list(batch), pad_id, IGNORE_INDEX)
    made: dict[str, Tensor] = {"input_ids": padded["tokens"], "labels": padded["labels"]}
    beside: list[ImageInputs] = [sample["image_inputs"] for sample in batch if "image_inputs" in sample]
    if beside:  # the model finds positions itself, as with the output of its processor
        for name in beside[0].types:
            columns = [torch.from_numpy(each.types[name]) for each in beside]
            made[name] = torch.nn.utils.rnn.pad_sequence(columns, batch_first=True)
        pixels = [tensors for each in beside for _, _, tensors in each.pixels]
        made |= {name: torch.cat([tensors[name] for tensors in pixels]) for name in (pixels[0] if pixels else ())}
    return made
