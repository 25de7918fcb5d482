"""Names of torchtune 0.6.1 that many files use and that need none of its models, formats or data.

Constants and the logger are defined here, so that update steps, plans, rows and losses import without torchtune. The
functions at the end are torchtune's, imported when one is first called.
"""

import logging
import os
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

IGNORE_INDEX = -100
"""Label of positions without a target: ``torchtune.data.CROSS_ENTROPY_IGNORE_IDX``."""
MODEL_KEY, ADAPTER_KEY, ADAPTER_CONFIG = "model", "adapter", "adapter_config"
"""Keys of the state dicts that checkpointers load and save."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Precisions by their name in a config."""


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


def instantiate(config: Any, *args: Any, **kwargs: Any) -> Any:
    """Builds the component of a config node, whose ``_component_`` gets ``args``, the node's other keys and ``kwargs``."""
    from torchtune.config import instantiate

    return instantiate(config, *args, **kwargs)


def get_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """Returns a precision by its name. Raises RuntimeError or ValueError if ``device`` does not support it."""
    from torchtune.training import get_dtype

    return get_dtype(dtype, device=device)


def get_memory_stats(device: torch.device) -> dict[str, float]:
    """Returns peaks of allocated and reserved memory [GiB] by name."""
    from torchtune.training import get_memory_stats

    return get_memory_stats(device)


def set_default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Makes new tensors of ``dtype`` in the block."""
    from torchtune.training import set_default_dtype

    return set_default_dtype(dtype)


def set_seed(seed: int | None, debug_mode: str | int | None = None) -> int:
    """Seeds all random generators by rank; draws a seed if it is None. Returns the seed of rank 0."""
    from torchtune.training import set_seed

    return set_seed(seed, debug_mode)
