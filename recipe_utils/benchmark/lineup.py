"""Baselines of a benchmark: resolved configs, skipped ones, contents of update steps."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe_utils.benchmark.baselines.kinds import DISTILLATION, KINDS, OWN_KEYS, PAIRS, POLICY, TEXT, why_skipped
from recipe_utils.benchmark.baselines.start import adapters_in, llama_config
from recipe_utils.benchmark.flops import countable_decoder, decoder_flops
from recipe_utils.benchmark.token_audit import (
    StepContents,
    contents_of,
    contents_of_groups,
    contents_of_pairs,
    samples_in_order,
)
from recipe_utils.cli.registry import config_path
from recipe_utils.parallel.ranks import resolve_device
from recipe_utils.settings.describe import load_recipe, settings_of
from recipe_utils.settings.keys import keys_of
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.settings.read import check_keys, read_settings
from recipe_utils.torchtune_names import instantiate
from recipe_utils.update_steps.settings import DataSettings

# Unmeasured update steps at the end, because the last steps of an epoch prefetch no data.
SPARE_STEPS = 4
_FIXED = {
    "epochs": 1,
    "resume_from_checkpoint": False,
    "run_val_every_n_steps": None,
    "save_every_n_minutes": None,
    "save_every_n_steps": None,
    "log_every_n_steps": 1,
    "log_peak_memory_stats": False,
}
"""Keys that a benchmark sets for all baselines."""
_DEFAULTS = {
    "batch_size": 1,
    "compile": False,
    "dtype": "fp32",
    "enable_activation_checkpointing": False,
    "lr_scheduler": None,
    "optimizer_in_bwd": False,
    "seed": None,
    "shuffle": True,
}
"""Keys that stock recipes require and update-step recipes do not."""
_STOCK_LOSSES = {
    TEXT: {"loss": "CEWithChunkedOutputLoss"},
    PAIRS: {},
    DISTILLATION: {"loss": "CEWithChunkedOutputLoss", "kd_loss": "ForwardKLWithChunkedOutputLoss"},
}
"""Recipe -> key -> torchtune's loss that replaces a loss of this project in stock recipes."""
_SUPPORTED = {
    "optimizer_in_bwd": (False, "it would step in every backward; set it to False"),
    "dataset.packed": (False, "not all trainers read rows; set it in an entry of kind=stock"),
    "quantizer": (None, "only kind=update_step trains with it; set it to null"),
    "sft_loss_weight": (0, "only kind=update_step adds it; set it to 0"),
    "tensor_parallel_dim": (1, "only data-parallel processes are compared; set it to 1"),
    "pipeline_parallel_dim": (1, "only data-parallel processes are compared; set it to 1"),
    "kd_loss.divergence": ("forward", "stock losses compare with forward only; set it to forward"),
    "kd_loss.temperature": (1, "stock has no temperature; set it to 1"),
    "kd_loss.teacher_temperature": (1, "stock has no temperature; set it to null"),
}
"""Key of the base config -> the value that all trainers support, and the problem of others."""


@dataclass(frozen=True)
class Baseline:
    """Entry of ``baselines``."""

    name: str
    kind: str
    recipe: str
    """Update-step recipe of the config."""
    recipe_file: str
    """Registered name or path of the recipe that ``kind=update_step`` runs."""
    config: dict[str, Any]
    """Resolved config in plain containers."""
    contents: list[StepContents]
    """Contents of each measured update step, by the order of the data."""
    draws_adapters: bool
    """True if the benchmark writes ``checkpointer.adapter_checkpoint`` at its start."""


def line_up(
    recipe: str, base: DictConfig, entries: Mapping[str, Any], output_dir: Path, num_ranks: int, num_steps: int
) -> tuple[dict[str, Baseline], dict[str, str]]:
    """Returns the baselines of ``entries`` over a ``base`` config by name, and why others are skipped.

    ``num_steps`` are the update steps of each round. Raises ConfigError with problems of all entries.
    """
    problems = list(_problems_with_base(base, recipe, output_dir))
    baselines: dict[str, Baseline] = {}
    skipped: dict[str, str] = {}
    # A wrong base makes every entry wrong; else the problems of all entries are collected.
    for name, entry in entries.items() if not problems else ():
        try:
            made = _resolve(name, entry, base, recipe, output_dir, num_ranks, num_steps)
        except ConfigError as error:
            problems += [Problem(f"baselines.{name}", str(problem)) for problem in error.problems]
            continue
        except (ValueError, OSError, OmegaConfBaseException) as error:
            problems.append(Problem(f"baselines.{name}", first_line(error)))
            continue
        # The reason why a baseline cannot run here: not an error.
        if isinstance(made, str):
            skipped[name] = made
        else:
            baselines[name] = made
    if problems:
        raise ConfigError(*problems)
    return baselines, skipped


def load_base_config(name_or_path: str) -> DictConfig:
    """Loads the base config of all baselines by registered name or path; raises ConfigError."""
    path, shown = config_path(name_or_path), f"update_step_config={name_or_path}"
    if not path.is_file():
        raise ConfigError(
            f"{shown}: it is neither the name of a config of this project nor a file; set it to "
            "llama3_2/5M_full_update_step or to the path of a YAML file"
        )
    try:
        loaded = OmegaConf.load(path)
    except (yaml.YAMLError, OSError) as error:
        raise ConfigError(f"{shown}: {first_line(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{shown}: it is a list, not keys")
    return loaded


def merged_with(base: DictConfig, overrides: Mapping[str, Any]) -> DictConfig:
    """Merges overrides into a copy of ``base``. Components replace the whole value."""
    merged = base.copy()
    for key, value in overrides.items():
        if isinstance(value, Mapping) and "_component_" in value:
            merged[key] = OmegaConf.create(dict(value))
        else:
            merged.merge_with({key: value})
    return merged


def first_line(error: Exception) -> str:
    """Returns the error message without the position in the config that OmegaConf appends."""
    return str(error).partition("\n")[0]


def _problems_with_base(base: DictConfig, recipe: str, output_dir: Path) -> Iterator[Problem]:
    """Yields wrong keys, and keys that other trainers do not support."""
    try:
        yield from check_keys(merged_with(base, {"output_dir": str(output_dir)}), settings_of(recipe))[1]
    except (ValueError, OSError, OmegaConfBaseException) as error:
        yield from ConfigError(first_line(error)).problems
    for key, (supported, text) in _SUPPORTED.items():
        if (value := OmegaConf.select(base, key)) not in (None, supported):
            yield Problem(f"overrides.{key}", text, value)
    loss = str(OmegaConf.select(base, "kd_loss._component_")).rpartition(".")[2]
    if loss.startswith(("Reverse", "Symmetric")):
        yield Problem("overrides.kd_loss", f"{loss}: only losses of the forward divergence compare")


def _resolve(
    name: str, entry: Any, base: DictConfig, recipe: str, output_dir: Path, num_ranks: int, num_steps: int
) -> Baseline | str:
    """Resolves the config of a baseline, or returns the reason that it is skipped.

    Paths that the base config derives from ``output_dir``, such as fresh weights, are shared by all
    baselines; each baseline writes to a separate folder. Baselines of one model start from the same
    adapters: ``checkpointer.adapter_checkpoint``, or fresh ones in a shared file.
    """
    kind = entry.get("kind") if isinstance(entry, Mapping) else None
    if kind not in KINDS[recipe]:
        raise ConfigError(Problem("kind", f"set it to one of {', '.join(KINDS[recipe])}", kind))
    overrides = {key: value for key, value in entry.items() if key not in ("kind", "recipe")}
    recipe_file, settings = _recipe_of(entry, recipe)
    foreign = OWN_KEYS.get(kind, set())
    recipe_overrides = {key: value for key, value in overrides.items() if key not in foreign}
    merged = merged_with(base, {**recipe_overrides, "output_dir": str(output_dir)})
    # Only keys of this entry: it may have replaced the reference to a key of the base config.
    if problems := [problem for problem in check_keys(merged, settings)[1] if problem.root in overrides]:
        raise ConfigError(*problems)
    if kind in (*OWN_KEYS, "limit") and OmegaConf.select(merged, "dataset.packed"):
        raise ConfigError(
            Problem("dataset.packed", f"kind={kind} does not read rows; set it in one of kind=stock", True)
        )
    adapters = adapters_in(merged)
    if reason := why_skipped(recipe, kind, num_ranks, adapters):
        return f"skipped: {reason}"

    # Everything that would differ between the trainers, or that one of them requires, is set.
    fixed = {**_FIXED, "output_dir": str(output_dir), "profiler": overrides.get("profiler")}
    config = merged_with(merged_with(base, overrides), fixed)
    config.pop("dataset_val", None)
    for key, value in {**_DEFAULTS, "device": resolve_device(None).type}.items():
        config.setdefault(key, value)
    if kind == "stock":
        for key, stock in _STOCK_LOSSES[recipe].items():
            loss = str(OmegaConf.select(config, f"{key}._component_"))
            if key not in overrides and not loss.startswith(("torch.", "torchtune.")):
                config[key] = {"_component_": f"torchtune.modules.loss.{stock}"}
    config.metric_logger = {"_component_": "recipe_utils.benchmark.interleave.LossLogger"}
    if recipe == DISTILLATION:
        config.metric_logger.kd_ratio = merged.get("kd_ratio", 0.5)
    # Other trainers know the number of microbatches only.
    batch_keys = ("batch_size", "gradient_accumulation_steps", "global_batch_size")
    data = read_settings(OmegaConf.create({key: config[key] for key in batch_keys if key in config}), DataSettings)
    config.gradient_accumulation_steps = data.num_accumulated(num_ranks, must_divide=True)
    config.pop("global_batch_size", None)
    config.max_steps_per_epoch = num_steps + SPARE_STEPS
    container: Any = OmegaConf.to_container(config, resolve=True)
    if kind in OWN_KEYS and "checkpoint_dir" not in container["checkpointer"]:
        llama_config(container["model"])  # raises ValueError
    # Keys used only in references are resolved; the recipe would reject them.
    known = {*keys_of(settings), *foreign}
    plain = {str(key): value for key, value in container.items() if key in known}
    folder = f"{output_dir}/baselines/{name}"
    checkpointer = {**plain["checkpointer"], "output_dir": folder}
    given = checkpointer.get("adapter_checkpoint")
    if adapters.modules:
        plain["seed"] = plain["seed"] or 0  # for adapters and dropout
        drawn = json.dumps([plain[key] for key in ("model", "dtype", "seed", "checkpointer")])
        fresh = f"{output_dir}/start_adapters/{zlib.crc32(drawn.encode()):08x}.pt"
        beside = Path(str(plain["checkpointer"].get("output_dir")), str(given))
        checkpointer["adapter_checkpoint"] = fresh if given is None else str(beside)
    plain |= {"output_dir": folder, "checkpointer": checkpointer}
    draws_adapters = bool(adapters.modules) and given is None
    contents = _contents_of(recipe, kind, plain, num_ranks, num_steps)
    return Baseline(name, kind, recipe, recipe_file, plain, contents, draws_adapters)


def _recipe_of(entry: Mapping[str, Any], recipe: str) -> tuple[str, type]:
    """Returns the update-step recipe that an entry runs, a registered name or a path, and its settings.

    Raises ConfigError if the key ``recipe`` names none, or the kind is another trainer's.
    """
    if (given := entry.get("recipe")) is None:
        return recipe, settings_of(recipe)
    if entry["kind"] != "update_step":
        raise ConfigError(Problem("recipe", "only kind=update_step runs a recipe file; take it out", given))
    try:
        settings, recipe_class = load_recipe(str(given))
    except ValueError as error:
        raise ConfigError(Problem("recipe", str(error))) from error
    if recipe_class is None:
        raise ConfigError(Problem("recipe", "the file needs one class with setup, update and train", given))
    return str(given), settings


def _contents_of(
    recipe: str, kind: str, config: Mapping[str, Any], num_ranks: int, num_steps: int
) -> list[StepContents]:
    """Counts the contents of update steps; raises ValueError if the dataset is too small."""
    cfg: Any = OmegaConf.create(dict(config))
    tokenizer = instantiate(cfg.tokenizer)
    samples = samples_in_order(cfg, tokenizer, num_ranks)
    per_step = cfg.batch_size * cfg.gradient_accumulation_steps * num_ranks
    if len(samples) < num_steps * per_step:
        raise ValueError(
            f"num_update_steps: the dataset has {len(samples)} samples, enough for "
            f"{len(samples) // per_step} update steps of {per_step}, warm-up included; set it lower"
        )
    # The shared prompt of a pair or a group counts once where the baseline computes it once.
    count = contents_of
    decoder = countable_decoder(config["model"]) if recipe == TEXT else None
    is_packed = kind == "update_step" and cfg.get("microbatching") == "packed"
    if recipe == PAIRS:
        count = partial(contents_of_pairs, shares_prefixes=is_packed and cfg.get("prefix_sharing") is not False)
    if recipe == POLICY:
        count = partial(contents_of_groups, shares_prompts=is_packed)
    steps = range(0, num_steps * per_step, per_step)
    contents = [count(samples[start : start + per_step], tokenizer.pad_id) for start in steps]
    # Operations only of models whose formula holds.
    for i, each in enumerate(contents) if decoder is not None else ():
        contents[i] = replace(
            each, num_flops=sum(decoder_flops(decoder, each.document_lengths, each.num_target_tokens))
        )
    return contents
