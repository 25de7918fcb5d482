"""Hugging Face's Trainer and TRL's trainers as baselines, with DDP on several processes.

All use the checkpoint folder and optimizer of the config and the samples in the recipes' order,
tokenized before the first step. ``attn_implementation`` is that of transformers (default:
``sdpa``).
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torchtune import config as torchtune_config
from torchtune import training
from torchtune.data import padded_collate_dpo, padded_collate_sft
from torchtune.utils import get_device

from recipe_utils.benchmark.baselines.start import adapters_in, make_lr_scheduler
from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.token_audit import IGNORE_INDEX, samples_in_order
from recipe_utils.checkpoint.peft import write_peft
from recipe_utils.data.loader.samples import Sample
from recipe_utils.model.adapters.merge import contents_of_export
from recipe_utils.parallel.process_group import world_size_from_env


def train_hf_trainer(config: DictConfig) -> None:
    """Trains with transformers' Trainer, without attention mask: only padding follows a sample.

    ``train_sampling_strategy`` is ``sequential`` or ``batch_rebalance``, which sorts and splits the
    samples of each update step.
    """
    from transformers import Trainer, TrainingArguments

    samples, pad_id = _samples(config)
    strategy = config.get("train_sampling_strategy", "sequential")
    run_trainer(
        config,
        Trainer,
        TrainingArguments(**{**_arguments(config), "train_sampling_strategy": strategy}),
        _inputs_and_labels(samples),
        data_collator=partial(_collate_text, pad_id, has_mask=False),
    )


def train_trl_sft(config: DictConfig) -> None:
    """Trains PEFT adapters with TRL's SFTTrainer. ``padding_free`` concatenates a microbatch."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    samples, pad_id = _samples(config)
    args = SFTConfig(
        **_arguments(config), max_length=None, padding_free=config.get("padding_free", True)
    )
    run_trainer(
        config,
        SFTTrainer,
        args,
        Dataset.from_list(_inputs_and_labels(samples)),
        _with_adapters(_load(config, config.checkpointer), config),
        processing_class=_padding_tokenizer(pad_id),
    )


def train_trl_dpo(config: DictConfig) -> None:
    """Tunes preferences with TRL's DPOTrainer, on the config's targets instead of whole answers."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    loss = torchtune_config.instantiate(config.loss)
    if type(loss).__name__ != "DPOLoss" or loss.label_smoothing:
        raise ValueError("loss: kind=trl needs torchtune's DPOLoss without label_smoothing")
    if config.get("ref_checkpointer") is not None:
        raise ValueError("ref_checkpointer: kind=trl takes checkpointer's weights; set it to null")
    pairs, pad_id = _samples(config)
    args = DPOConfig(
        **_arguments(config),
        beta=loss.beta,
        precompute_ref_log_probs=config.get("precompute_ref_log_probs", False),
        max_length=None,
    )

    def collate(batch: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        tokens, labels = padded_collate_dpo(list(batch), pad_id, IGNORE_INDEX)
        sides = ("chosen_input_ids", "rejected_input_ids")
        lengths = [len(pair[side]) for side in sides for pair in batch]
        collated = {
            "input_ids": tokens,
            "attention_mask": _is_real(tokens, lengths),
            "completion_mask": (labels != IGNORE_INDEX).long(),
        }
        for key in ("ref_chosen_logps", "ref_rejected_logps"):
            if key in batch[0]:
                collated[key] = torch.tensor([pair[key] for pair in batch])
        return collated

    run_trainer(
        config,
        DPOTrainer,
        args,
        Dataset.from_list([dict(pair) for pair in pairs]),
        data_collator=collate,
        processing_class=_padding_tokenizer(pad_id),
    )


def train_trl_gkd(config: DictConfig) -> None:
    """Distills with TRL's GKDTrainer on the dataset (``lmbda=0``) with the forward KL (``beta=0``).

    The loss is the divergence without cross-entropy and the teacher's entropy.
    """
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    samples, pad_id = _samples(config)
    run_trainer(
        config,
        GKDTrainer,
        GKDConfig(**_arguments(config), lmbda=0.0, beta=0.0, max_length=None),
        Dataset.from_list(_inputs_and_labels(samples)),
        teacher_model=_load(config, config.teacher_checkpointer),
        data_collator=partial(_collate_text, pad_id, has_mask=True),
        processing_class=_padding_tokenizer(pad_id),
    )


def run_trainer(
    config: DictConfig,
    trainer_class: type,
    args: Any,
    dataset: Any,
    model: Any = None,
    **options: Any,
) -> None:
    """Trains with Trainer or a subclass on tokenized samples in their order; logs each loss.

    ``model`` is that of ``checkpointer`` by default.
    """
    from transformers.trainer_callback import TrainerCallback

    class ReportLoss(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if state.is_world_process_zero:
                LossLogger().log_dict(logs, state.global_step)

    class InGivenOrder(trainer_class):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # TRL would tokenize it again

        def _get_train_sampler(self, *args: Any) -> Any:
            sampler: Any = super()._get_train_sampler(*args)
            sampler.shuffle = False  # batch_rebalance would make update steps of other samples
            return sampler

    model = model or _load(config, config.checkpointer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torchtune_config.instantiate(config.optimizer, trained)
    args._n_gpu = min(args.n_gpu, 1)  # one process would use all GPUs of the machine
    InGivenOrder(
        model=model,
        args=args,
        train_dataset=dataset,
        callbacks=[ReportLoss()],
        optimizers=(optimizer, make_lr_scheduler(config, optimizer)),
        **options,
    ).train()


def _arguments(config: DictConfig) -> dict[str, Any]:
    """Returns the common TrainingArguments."""
    is_on_cpu = get_device(config.device).type == "cpu"
    return {
        "output_dir": config.output_dir,
        "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "num_train_epochs": 1,
        "max_steps": config.max_steps_per_epoch or -1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": config.get("clip_grad_norm") or 0.0,
        "gradient_checkpointing": config.get("enable_activation_checkpointing", False),
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,  # no autocast: the model has the precision of the config
        "use_cpu": is_on_cpu,
        "ddp_backend": "gloo" if training.is_distributed() and is_on_cpu else None,
        "disable_tqdm": True,
    }


def _samples(config: DictConfig) -> tuple[list[Sample], int]:
    """Returns the samples in the recipes' order, and the padding token."""
    tokenizer = torchtune_config.instantiate(config.tokenizer)
    return samples_in_order(config, tokenizer, world_size_from_env()), tokenizer.pad_id


def _inputs_and_labels(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [{"input_ids": each["tokens"], "labels": each["labels"]} for each in samples]


def _collate_text(
    pad_id: int, batch: Sequence[Mapping[str, Any]], has_mask: bool
) -> dict[str, Tensor]:
    renamed = [{"tokens": each["input_ids"], "labels": each["labels"]} for each in batch]
    padded = padded_collate_sft(renamed, pad_id, IGNORE_INDEX)
    collated = {"input_ids": padded["tokens"], "labels": padded["labels"]}
    if has_mask:
        lengths = [len(each["input_ids"]) for each in batch]
        collated["attention_mask"] = _is_real(padded["tokens"], lengths)
    return collated


def _is_real(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns the attention mask of padded rows, shaped like ``tokens``."""
    return (torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]).long()


def _load(config: DictConfig, checkpointer: DictConfig) -> Any:
    from transformers import AutoModelForCausalLM

    torchtune_config.instantiate(checkpointer)  # a checkpointer of fresh weights writes them
    device = get_device(config.device)
    model = AutoModelForCausalLM.from_pretrained(
        checkpointer.checkpoint_dir,
        dtype=training.get_dtype(config.dtype, device=device),
        attn_implementation=config.get("attn_implementation", "sdpa"),
    )
    return model.to(device)


def _with_adapters(base: Any, config: DictConfig) -> Any:
    """Adds the initial adapters to a transformers model; PEFT loads them from files."""
    from peft import PeftModel

    # One folder per rank: there is no process group yet for a barrier.
    folder = Path(config.output_dir) / f"peft_{os.environ.get('RANK', '0')}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").touch()  # write_peft replaces it
    given = torch.load(config.checkpointer.adapter_checkpoint, weights_only=True)
    contents, _ = contents_of_export(given, adapters_in(config), dtype=None)
    checkpointer = torchtune_config.instantiate(config.checkpointer)
    adapters = contents[training.ADAPTER_KEY]
    write_peft(folder, checkpointer, adapters, contents[training.ADAPTER_CONFIG])
    return PeftModel.from_pretrained(
        base, str(folder), is_trainable=True, autocast_adapter_dtype=False
    )


def _padding_tokenizer(pad_id: int) -> Any:
    """Returns a tokenizer with only the padding token, sufficient for TRL."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    padding = Tokenizer(WordLevel({"<pad>": pad_id}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=padding, pad_token="<pad>")
