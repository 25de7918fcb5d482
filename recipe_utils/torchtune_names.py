"""Names of torchtune 0.6.1 that many files use and that need none of its models, formats or data.

Constants and the logger are defined here, so that update steps, plans, rows and losses import without torchtune. The
functions below are torchtune's, imported when a file first uses one.
"""

import logging
import os
from functools import cache

import torch
import torch.distributed as dist

from recipe_utils import exported

IGNORE_INDEX = -100
"""Label of positions without a target: ``torchtune.data.CROSS_ENTROPY_IGNORE_IDX``."""
MODEL_KEY, ADAPTER_KEY, ADAPTER_CONFIG = "model", "adapter", "adapter_config"
"""Keys of the state dicts that checkpointers load and save."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Precisions by their name in a config."""

__getattr__ = exported(
    {
        "torchtune.config": "instantiate",
        "torchtune.training": "get_dtype get_memory_stats set_default_dtype set_seed",
    }
)


def _make_logger() -> logging.Logger:
    made = logging.getLogger("recipe_utils")
    if not made.hasHandlers():
        made.addHandler(logging.StreamHandler())
    made.setLevel(logging.INFO)
    return made


logger = _make_logger()
"""Logger of this project's messages, to stderr unless the program has handlers of its own."""
LOGGERS = (logger, logging.getLogger("torchtune.utils._logging"))
"""Loggers of all messages of a training: ours and torchtune's."""


def log_rank_zero(text: str, level: int = logging.INFO) -> None:
    """Logs a message on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.log(level, text, stacklevel=2)


@cache
def log_once(text: str, level: int = logging.INFO) -> None:
    """Logs a line on rank 0, also before process groups exist, once in a process."""
    if os.environ.get("RANK", "0") == "0":
        logger.log(level, text)
