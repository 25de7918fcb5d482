"""The peers that train through Hugging Face's Trainer: its own, and TRL's with adapters of PEFT's."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torchtune import config as torchtune_config
from torchtune import training
from torchtune.data import padded_collate_sft
from torchtune.models.convert_weights import hf_to_tune
from torchtune.utils import get_device

from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.shared_by_peers import (
    IGNORE_INDEX,
    TakeModel,
    gradients_of,
    make_lr_scheduler,
    samples_in_order,
)
from recipe_utils.benchmark.start_adapters import adapters_in
from recipe_utils.checkpoint.peft import from_peft, write_peft
from recipe_utils.data.loader.samples import Sample
from recipe_utils.model.adapters.adapters import Adapters
from recipe_utils.model.adapters.merge import contents_of_export
from recipe_utils.parallel.process_group import world_size_from_env


def train_hf_trainer(config: DictConfig, take_model: TakeModel) -> None:
    """Hugging Face's Trainer on the checkpoint folder, the samples and the optimizer of the config.

    As fast as it goes with them: samples are tokenized before the first step, and no attention mask is
    made, since nothing but padding comes after a sample. With several processes it trains with DDP.

    Args:
        config: ``checkpointer.checkpoint_dir`` must be a Hugging Face folder. The key
            ``train_sampling_strategy`` is ``sequential`` (samples in the config's order) or
            ``batch_rebalance`` (sorts and cuts each update step's samples), here unshuffled.
        take_model: gets this peer's gradients.
    """
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    tokenizer = torchtune_config.instantiate(config.tokenizer)
    samples = samples_in_order(config, tokenizer, world_size_from_env())
    device = get_device(config.device)
    dtype = training.get_dtype(config.dtype, device=device)
    model = AutoModelForCausalLM.from_pretrained(config.checkpointer.checkpoint_dir, dtype=dtype)
    model.to(device)
    optimizer = torchtune_config.instantiate(config.optimizer, model.parameters())

    def collate(batch: Sequence[Sample]) -> dict[str, Tensor]:
        renamed = [{"tokens": each["input_ids"], "labels": each["labels"]} for each in batch]
        collated = padded_collate_sft(renamed, tokenizer.pad_id, IGNORE_INDEX)
        return {"input_ids": collated["tokens"], "labels": collated["labels"]}

    class InGivenOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            sampler: Any = super()._get_train_sampler(*args)
            sampler.shuffle = False  # batch_rebalance would make update steps of other samples
            return sampler

    take_model(lambda: gradients_by_torchtune_name(model))
    args = TrainingArguments(
        **trainer_arguments(config, device),
        train_sampling_strategy=config.get("train_sampling_strategy", "sequential"),
        remove_unused_columns=False,
    )
    args._n_gpu = min(args.n_gpu, 1)  # or one process would use all GPUs of the machine
    trainer = InGivenOrder(
        model=model,
        args=args,
        train_dataset=[{"input_ids": s["tokens"], "labels": s["labels"]} for s in samples],
        data_collator=collate,
        callbacks=[report_loss()],
        optimizers=(optimizer, make_lr_scheduler(config, optimizer)),
    )
    trainer.train()


def train_trl(config: DictConfig, take_model: TakeModel) -> None:
    """TRL's SFTTrainer with PEFT's adapters on the checkpoint folder, samples and optimizer of the config.

    PEFT reads the adapters that the other peers start from, so they have their rank, alpha, modules and
    values. With several processes it trains with DDP.

    Args:
        config: ``checkpointer`` must be torchtune's for a Hugging Face folder. The key ``padding_free``
            (True) puts the samples of a microbatch into one row; False pads them. The key
            ``attn_implementation`` is transformers' (sdpa).
        take_model: gets this peer's gradients.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    _keep_peft_from_torchao()
    from peft import PeftModel

    tokenizer = torchtune_config.instantiate(config.tokenizer)
    samples = samples_in_order(config, tokenizer, world_size_from_env())
    device = get_device(config.device)
    dtype = training.get_dtype(config.dtype, device=device)
    checkpointer = torchtune_config.instantiate(config.checkpointer)
    adapters = adapters_in(config)
    base = AutoModelForCausalLM.from_pretrained(
        config.checkpointer.checkpoint_dir,
        dtype=dtype,
        attn_implementation=config.get("attn_implementation", "sdpa"),
    )
    folder = _write_for_peft(config, checkpointer, adapters)
    model = PeftModel.from_pretrained(
        base.to(device), folder, is_trainable=True, autocast_adapter_dtype=False
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torchtune_config.instantiate(config.optimizer, trained)

    def gradients() -> dict[str, Tensor]:
        found = {}
        for name, gradient in gradients_of(model).items():
            # PEFT's files leave out what these are called in the model.
            name = name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector")
            found[name.replace(".default", "")] = gradient
        return from_peft(found, adapters.trained, checkpointer)

    class InGivenOrder(SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    take_model(gradients)
    args = SFTConfig(
        **trainer_arguments(config, device),
        gradient_checkpointing=config.get("enable_activation_checkpointing", False),
        padding_free=config.get("padding_free", True),
        max_length=None,  # the config's tokenizer has cut them
        dataset_kwargs={"skip_prepare_dataset": True},
        bf16=False,  # no autocast: the model is in the config's precision
    )
    args._n_gpu = min(args.n_gpu, 1)
    trainer = InGivenOrder(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(
            [{"input_ids": s["tokens"], "labels": s["labels"]} for s in samples]
        ),
        processing_class=padding_tokenizer(tokenizer.pad_id),
        callbacks=[report_loss()],
        optimizers=(optimizer, make_lr_scheduler(config, optimizer)),
    )
    trainer.train()


def _write_for_peft(config: DictConfig, checkpointer: Any, adapters: Adapters) -> str:
    """Writes the adapters to start from as PEFT reads them; returns the folder."""
    # Each rank for itself: there is no process group yet to wait for another in.
    folder = Path(config.output_dir) / f"peft_{os.environ.get('RANK', '0')}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").touch()  # write_peft replaces
    # Read by itself: a checkpointer would hold the base a second time, which counts as peak memory.
    given = torch.load(config.checkpointer.adapter_checkpoint, weights_only=True)
    contents, _ = contents_of_export(given, adapters, dtype=None)
    write_peft(
        folder, checkpointer, contents[training.ADAPTER_KEY], contents[training.ADAPTER_CONFIG]
    )
    return str(folder)


def _keep_peft_from_torchao() -> None:
    """PEFT raises where it meets a torchao older than it knows, although nothing here is quantised by it."""
    for name in ("import_utils", "tuners.lora.torchao", "utils.quantization_utils"):
        importlib.import_module(f"peft.{name}").is_torchao_available = lambda: False  # type: ignore[attr-defined]


def gradients_by_torchtune_name(model: Any) -> dict[str, Tensor]:
    """The gradient of each parameter of a Llama of transformers', by its name in torchtune's."""
    sizes = model.config
    return hf_to_tune(
        gradients_of(model),
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        dim=sizes.hidden_size,
        head_dim=getattr(sizes, "head_dim", None),
    )


def padding_tokenizer(pad_id: int) -> Any:
    """What TRL takes for a tokenizer, of which all that it asks is the token to pad with."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    padding = Tokenizer(WordLevel({"<pad>": pad_id}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=padding, pad_token="<pad>")


def trainer_arguments(config: DictConfig, device: torch.device) -> dict[str, Any]:
    """What all of Hugging Face's trainers are told alike."""
    return {
        "output_dir": config.output_dir,
        "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "num_train_epochs": 1,
        "max_steps": config.max_steps_per_epoch or -1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": config.get("clip_grad_norm") or 0.0,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": device.type == "cpu",
        "ddp_backend": "gloo" if training.is_distributed() and device.type == "cpu" else None,
        "disable_tqdm": True,
    }


def report_loss() -> Any:
    """A callback that hands each logged loss to the gate of this process."""
    from transformers.trainer_callback import TrainerCallback

    class ReportLoss(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if state.is_world_process_zero:
                LossLogger().log_dict(logs, state.global_step)

    return ReportLoss()
