"""TRL's SFTTrainer as a baseline, on one process, with its packing or its flattened microbatches.

A microbatch is one row without padding. Its samples are kept apart by positions that restart at 0: by FlashAttention
on a GPU, if it is installed, else by a mask that transformers makes of them. Liger's kernels need Triton.
"""

from datasets import Dataset
from omegaconf import DictConfig
from torchtune import config as torchtune_config
from transformers.utils import is_flash_attn_2_available, is_liger_kernel_available
from trl import SFTConfig, SFTTrainer

from recipe_utils.benchmark.baselines.hugging_face import tokenizer_of_numbers, trainer_arguments, what_is_trained
from recipe_utils.benchmark.token_audit import samples_in_order

_COLUMNS = {"tokens": "input_ids", "seq_lens": "seq_lengths"}


def train(config: DictConfig) -> None:
    """Trains with TRL's loss."""
    make_trainer(config).train()


def make_trainer(config: DictConfig) -> SFTTrainer:
    """Returns a trainer of flattened microbatches; ``sft`` has further arguments, such as ``packing``."""
    samples = samples_in_order(config, torchtune_config.instantiate(config.tokenizer), num_ranks=1)
    parts = what_is_trained(config)
    has_kernels = config.device == "cuda" and config.dtype == "bf16"
    if has_kernels and is_flash_attn_2_available():
        parts["model"].set_attn_implementation("flash_attention_2")
    arguments = {
        "per_device_train_batch_size": config.batch_size,
        "train_sampling_strategy": "sequential",
        "dataset_kwargs": {"skip_prepare_dataset": True},  # tokenized, packed and shuffled before
        "padding_free": True,
        "max_length": None,
        "use_liger_kernel": has_kernels and is_liger_kernel_available(),
        **trainer_arguments(config),
        **config.get("sft", {}),
    }
    rows = [{_COLUMNS.get(key, key): value for key, value in sample.items()} for sample in samples]
    return SFTTrainer(
        args=SFTConfig(**arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer_of_numbers(parts["model"], config),
        **parts,
    )
