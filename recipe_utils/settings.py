"""Collects everything that is wrong with a config, to raise it together and early."""

import difflib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion
from torchtune import training, utils

from recipe_utils.model.pipeline import (
    SCHEDULES,
    has_several_stages_per_rank,
    num_microbatches_to_run,
)


class ConfigError(ValueError):
    """Every problem of a config, one per line."""


class Problems:
    """A list of problems that is raised as one error.

    Example:
        >>> problems = Problems()
        >>> with problems.collect():
        ...     dims = resolve_parallel_dims(...)   # its ValueError is noted, not raised
        >>> problems.add("dtype=fp16: ...")
        >>> problems.raise_if_any()
    """

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        """Notes a problem, in the form ``key=value: what is wrong; what to set instead``."""
        self._texts.append(text)

    @contextmanager
    def collect(self, prefix: str = "") -> Iterator[None]:
        """Notes any exception of the block, with ``prefix`` before its text."""
        try:
            yield
        except Exception as error:
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            self.add(f"{prefix}{error}{cause}")

    def check_at_least(self, least: int, **values: float | None) -> None:
        """Notes each ``key=value`` that is no number or below ``least``; None is fine."""
        for key, value in values.items():
            if value is not None and not (isinstance(value, (int, float)) and value >= least):
                self.add(f"{key}={value}: it must be at least {least}")

    def check_more_than_zero(self, **values: float | None) -> None:
        """Notes each ``key=value`` that is no number above 0; None is fine."""
        for key, value in values.items():
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                self.add(f"{key}={value}: it must be a number above 0; leave it out for never")

    def check_one_of(self, allowed: Iterable[str], **values: str) -> None:
        """Notes each ``key=value`` that is not among ``allowed``."""
        for key, value in values.items():
            if value not in allowed:
                self.add(f"{key}={value}: unknown; set it to one of {', '.join(allowed)}")

    def raise_if_any(self) -> None:
        """Raises what was noted.

        Raises:
            ConfigError: at least one problem was noted.
        """
        if self._texts:
            noun = "problem" if len(self._texts) == 1 else "problems"
            lines = "".join(f"\n  - {text}" for text in self._texts)
            raise ConfigError(f"{len(self._texts)} {noun} in the config:{lines}")


def check_keys(
    problems: Problems, config: Mapping[str, Any], known: Iterable[str], required: Iterable[str]
) -> None:
    """Notes top-level keys that nothing reads, and components that are missing.

    A key of the user's own is fine where another value refers to it as ``${key}``.

    Args:
        problems: where to note them.
        config: the unresolved config as plain containers.
        known: the keys that the recipe reads.
        required: keys of components that the recipe cannot do without.
    """
    known = sorted(known)
    referred = set(re.findall(r"\$\{\s*([\w-]+)", str(config)))
    for key in config:
        if key not in known and key not in referred:
            similar = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "take it out"
            problems.add(f"{key}: this recipe has no such key; {hint}")
    for key in required:
        if config.get(key) is None:
            problems.add(f"{key}: it is missing; set it to a component (_component_: ...)")


def check_microbatching(
    problems: Problems,
    microbatching: str,
    max_tokens_per_microbatch: int | None,
    balance_over_ranks: bool,
    collate_fn: str | None,
) -> None:
    """Notes keys that the plan does not go with."""
    if microbatching == "in_order" and max_tokens_per_microbatch is not None:
        problems.add(
            f"max_tokens_per_microbatch={max_tokens_per_microbatch}: microbatching=in_order counts "
            "samples, not tokens; set microbatching=packed or least_padding"
        )
    if microbatching == "in_order" and balance_over_ranks:
        problems.add(
            "balance_over_ranks=True: microbatching=in_order leaves every sample on its rank; set "
            "microbatching=packed or least_padding"
        )
    if microbatching == "packed" and collate_fn is not None:
        problems.add(
            f"collate_fn={collate_fn}: microbatching=packed makes its rows itself; leave the key out, or "
            "set microbatching=least_padding"
        )


def check_packing(
    problems: Problems,
    other_attention: str | None,
    row_length: int | None,
    needs_row_length: bool,
) -> None:
    """Notes why ``microbatching=packed`` cannot be.

    Args:
        problems: where to note it.
        other_attention: the kind of attention that keeps documents of a row together, if any.
        row_length: bound on a row [tokens], if any.
        needs_row_length: rows must have a fixed length.
    """
    if other_attention is not None:
        problems.add(
            f"microbatching=packed: the model's {other_attention} cannot keep documents of a row apart; "
            "set microbatching=least_padding"
        )
    if needs_row_length and row_length is None:
        problems.add(
            "microbatching=packed: without max_tokens_per_microbatch and tokenizer.max_seq_len rows "
            "have no fixed length, which compile=True and CUDA need; set one of the two"
        )


def check_optimizer_in_bwd(
    problems: Problems,
    optimizer_in_bwd: bool,
    clip_grad_norm: float | str | None,
    gradient_accumulation_steps: int,
    microbatching: str,
) -> None:
    """Notes what excludes an optimizer that steps inside the backward."""
    if optimizer_in_bwd and microbatching != "in_order":
        problems.add(
            f"microbatching={microbatching}: it may cut an update step into several microbatches, and "
            "with optimizer_in_bwd=True every backward updates the weights; set one of the two to "
            "in_order or False"
        )
    if optimizer_in_bwd and clip_grad_norm is not None:
        problems.add(
            f"clip_grad_norm={clip_grad_norm}: with optimizer_in_bwd=True no moment has all "
            "gradients to clip; set one of the two to null or False"
        )
    if optimizer_in_bwd and gradient_accumulation_steps > 1:
        problems.add(
            f"gradient_accumulation_steps={gradient_accumulation_steps}: with "
            "optimizer_in_bwd=True every backward updates the weights; set it to 1, or "
            "optimizer_in_bwd=False"
        )


def check_tensor_parallel(
    problems: Problems, tensor_parallel_dim: int, has_plan: bool, fused: bool
) -> None:
    """Notes what tensor parallelism lacks or excludes."""
    if tensor_parallel_dim > 1 and not has_plan:
        problems.add(
            f"tensor_parallel_dim={tensor_parallel_dim}: set tensor_parallel_plan, too, such as "
            "torchtune.models.llama3.base_llama_tp_plan"
        )
    if tensor_parallel_dim > 1 and fused:
        problems.add("optimizer.fused=True: tensor parallelism needs it False")


def resolve_num_stages(
    pipeline_parallel_dim: int, schedule: str, split_points: Sequence[int] | None
) -> int:
    """Pipeline stages over all ranks: one on each, or two with interleaved schedules.

    Args:
        pipeline_parallel_dim: ranks of a pipeline.
        schedule: its name.
        split_points: where stages begin but for the first; these then say how many there are.

    Raises:
        ValueError: an unknown schedule, or split points that make no such number of stages.
    """
    if schedule not in SCHEDULES:
        raise ValueError(
            f"pipeline_parallel_schedule={schedule}: unknown; set it to one of {', '.join(SCHEDULES)}"
        )
    several = has_several_stages_per_rank(schedule)
    if split_points is None:
        return pipeline_parallel_dim * (2 if several else 1)
    num_stages = len(split_points) + 1
    per_rank, rest = divmod(num_stages, pipeline_parallel_dim)
    if rest or (per_rank < 2 if several else per_rank != 1):
        wanted = "two or more" if several else "one"
        raise ValueError(
            f"pipeline_parallel_split_points={list(split_points)}: they make {num_stages} stages, but "
            f"pipeline_parallel_schedule={schedule} wants {wanted} on each of {pipeline_parallel_dim} "
            f"ranks; give {pipeline_parallel_dim * (2 if several else 1) - 1} points"
        )
    return num_stages


def check_pipeline_parallel(
    problems: Problems,
    pipeline_parallel_dim: int,
    num_stages: int,
    schedule: str,
    *,
    num_microbatches: int | None,
    tensor_parallel_dim: int,
    optimizer_in_bwd: bool,
    enable_activation_offloading: bool,
) -> None:
    """Notes what pipeline stages lack or exclude.

    Args:
        problems: where to note it.
        pipeline_parallel_dim: ranks of a pipeline, at least 2.
        num_stages: over all ranks.
        schedule: its name.
        num_microbatches: per update step and data-parallel rank; None where it is not fixed.
        tensor_parallel_dim: excluded above 1.
        optimizer_in_bwd: excluded.
        enable_activation_offloading: excluded.
    """
    name = f"pipeline_parallel_dim={pipeline_parallel_dim}"
    # Stages of older ones want one shape for all microbatches.
    if TorchVersion(torch.__version__) < "2.13":
        problems.add(f"{name}: it needs torch 2.13, this is {torch.__version__}; set it to 1")
    if num_microbatches is not None and schedule in SCHEDULES:
        to_run = num_microbatches_to_run(
            max(num_microbatches, pipeline_parallel_dim),
            schedule=schedule,
            num_ranks=pipeline_parallel_dim,
            num_stages=num_stages,
        )
        if num_microbatches != to_run:
            problems.add(
                f"gradient_accumulation_steps={num_microbatches}: {name} with {num_stages} stages and "
                f"pipeline_parallel_schedule={schedule} needs {to_run} microbatches or more per update "
                f"step; set gradient_accumulation_steps={to_run} (and a smaller batch_size)"
            )
    if tensor_parallel_dim > 1:
        problems.add(
            f"tensor_parallel_dim={tensor_parallel_dim}: it does not go with {name}; set one of the two to 1"
        )
    if optimizer_in_bwd:
        problems.add(f"optimizer_in_bwd=True: {name} has several microbatches; set it to False")
    if enable_activation_offloading:
        problems.add(
            f"enable_activation_offloading=True: it does not go with {name}; set it to False"
        )


def check_activation_memory(
    problems: Problems,
    device: torch.device,
    enable_activation_checkpointing: bool,
    enable_activation_offloading: bool,
    ac_mode: str | None,
) -> None:
    """Notes ways to save activation memory that exclude each other or need another device."""
    if enable_activation_offloading and device.type != "cuda":
        problems.add("enable_activation_offloading=True: it needs device=cuda; set it to False")
    if enable_activation_offloading and not enable_activation_checkpointing:
        problems.add(
            "enable_activation_offloading=True: it needs enable_activation_checkpointing=True"
        )
    if enable_activation_checkpointing and ac_mode is not None:
        problems.add(
            f"ac_mode={ac_mode}: enable_activation_checkpointing=True recomputes all layers "
            "already; set one of the two to null or False"
        )


def resolve_device(device: str | None) -> torch.device:
    """The device of this rank; None takes what the machine has.

    Raises:
        ValueError: a device that is not there. (torchtune would go on with the CPU.)
    """
    try:
        found = utils.get_device(device=device)
    except Exception as error:
        raise ValueError(f"device={device}: {error}; set it to a device of this machine") from None
    if device is not None and found.type != torch.device(device).type:
        raise ValueError(
            f"device={device}: this machine has none that PyTorch can use; set device={found.type}"
        )
    return found


def resolve_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """The precision of parameters, gradients and optimizer state.

    Raises:
        ValueError: a precision that is unknown, or that full fine-tuning on ``device`` cannot use.
    """
    if dtype == "fp16":
        raise ValueError("dtype=fp16: gradients would underflow; set it to bf16 or fp32")
    try:
        return training.get_dtype(dtype, device=device)
    except Exception as error:
        raise ValueError(f"dtype={dtype}: {error}") from None


def resolve_gradient_accumulation_steps(
    batch_size: int,
    gradient_accumulation_steps: int | None,
    global_batch_size: int | None,
    dp_degree: int,
) -> int:
    """Microbatches per rank and update step, from whichever of the two keys is given.

    Args:
        batch_size: samples per microbatch.
        gradient_accumulation_steps: microbatches per rank and update step.
        global_batch_size: samples per update step over all data-parallel ranks.
        dp_degree: number of ranks that hold different data.

    Raises:
        ValueError: a number below 1, a global batch that does not divide, or two keys that disagree.
    """
    for name, value in (
        ("batch_size", batch_size),
        ("gradient_accumulation_steps", gradient_accumulation_steps),
        ("global_batch_size", global_batch_size),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: it must be at least 1")
    if global_batch_size is None:
        return gradient_accumulation_steps or 1
    per_pass = batch_size * dp_degree
    steps, rest = divmod(global_batch_size, per_pass)
    if rest:
        raise ValueError(
            f"global_batch_size={global_batch_size}: it is no multiple of batch_size={batch_size} * "
            f"{dp_degree} data-parallel ranks = {per_pass}; the nearest multiples are "
            f"{max(steps, 1) * per_pass} and {(max(steps, 1) + 1) * per_pass}"
        )
    if gradient_accumulation_steps not in (None, steps):
        raise ValueError(
            f"global_batch_size={global_batch_size}: batch_size={batch_size} * "
            f"gradient_accumulation_steps={gradient_accumulation_steps} * {dp_degree} data-parallel "
            f"ranks = {batch_size * (gradient_accumulation_steps or 1) * dp_degree}; give one of the "
            f"two keys (~gradient_accumulation_steps on the command line takes that one out)"
        )
    return steps


def check_writable_dir(key: str, path: str | None) -> None:
    """Makes the directory if need be, and tries to write to it.

    Raises:
        ValueError: it is None, or cannot be made or written to.
    """
    if path is None:
        raise ValueError(f"{key}: it is missing; set it to a directory for checkpoints and logs")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"{key}={path}: it cannot be written to ({os.strerror(error.errno or 0)}); set it to a "
            "directory of yours"
        ) from None
