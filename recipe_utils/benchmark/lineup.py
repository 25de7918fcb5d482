"""Baselines of a benchmark: resolved configs, skipped ones, contents of update steps."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic.dataclasses import dataclass
from torchtune import config as torchtune_config

from recipe_utils.benchmark.baselines.kinds import (
    DISTILLATION,
    KINDS,
    OWN_KEYS,
    PAIRS,
    TEXT,
    why_skipped,
)
from recipe_utils.benchmark.baselines.start import adapters_in
from recipe_utils.benchmark.token_audit import (
    StepContents,
    contents_of,
    contents_of_pairs,
    samples_in_order,
)
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.parallel.process_group import world_size_from_env
from recipe_utils.parallel.ranks import resolve_device
from recipe_utils.settings.describe import settings_of
from recipe_utils.settings.keys import AS_WRITTEN, STRICT, Count, FilePath, keys_of
from recipe_utils.settings.problems import ConfigError, Problem, problems_with_folder
from recipe_utils.settings.read import check_keys, read_settings
from recipe_utils.tune.registry import config_path

# Unmeasured update steps at the end, because the last steps of an epoch prefetch no data.
SPARE_STEPS = 4
_settings_of = cache(settings_of)
_FIXED = {
    "epochs": 1,
    "resume_from_checkpoint": False,
    "run_val_every_n_steps": None,
    "save_every_n_minutes": None,
    "log_every_n_steps": 1,
    "log_peak_memory_stats": False,
    "profiler": None,
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
    DISTILLATION: {
        "loss": "CEWithChunkedOutputLoss",
        "kd_loss": "ForwardKLWithChunkedOutputLoss",
    },
}
"""Recipe -> key -> torchtune's loss that replaces a loss of this project in stock recipes."""


@plain_dataclass(frozen=True)
class Baseline:
    """Entry of ``peers``."""

    name: str
    kind: str
    config: dict[str, Any]
    """Resolved config in plain containers."""
    draws_adapters: bool = False
    """True if the benchmark writes ``checkpointer.adapter_checkpoint`` at its start."""
    recipe: str = TEXT
    """Update-step recipe of the config."""

    @property
    def shares_prefixes(self) -> bool:
        """True if the model computes a common prefix of both sides of a pair once."""
        is_ours = self.recipe == PAIRS and self.kind == "update_step"
        is_packed = self.config.get("microbatching") == "packed"
        return is_ours and is_packed and self.config.get("prefix_sharing") is not False


@plain_dataclass
class Lineup:
    """Baselines of a benchmark."""

    baselines: list[Baseline] = field(default_factory=list)
    """Baselines that run."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name -> reason."""
    contents: dict[str, list[StepContents]] = field(default_factory=dict)
    """Name -> contents of each measured update step, by the order of the data."""
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, config=STRICT)
class LineupSettings:
    """Config keys of the comparison."""

    output_dir: FilePath
    """Folder for the report and the output of the baselines."""
    update_step_config: str
    """Config of `update_step_recipe` for all baselines, by name or path."""
    peers: Annotated[dict[str, Any], AS_WRITTEN]
    """Baselines: name -> `kind` (stock, update_step, hf_trainer, trl, or limit, a bare loop) and
    overrides of the config."""
    update_step_recipe: Literal[
        "full_finetune_update_step", "full_dpo_update_step", "knowledge_distillation_update_step"
    ] = "full_finetune_update_step"
    """Recipe of the config. Only fine-tuning has an hf_trainer."""
    overrides: Annotated[dict[str, Any], AS_WRITTEN] | None = None
    """Overrides of the config for all baselines."""
    baseline: str | None = None
    """Name of the denominator of ratios; null is the first baseline."""
    num_warmup_steps: Count = 1
    """Untimed update steps of each round. The first one includes loading."""
    num_update_steps: Count = 8
    """Timed update steps of each round."""
    nproc_per_node: Count = 1
    """Data-parallel processes of each baseline."""

    @property
    def num_steps(self) -> int:
        """Update steps of each round."""
        return self.num_warmup_steps + self.num_update_steps

    @property
    def reference(self) -> str:
        """Name of the denominator of ratios."""
        return self.baseline or next(iter(self.peers), "")

    @cached_property
    def lineup(self) -> Lineup:
        """Baselines, cached because counting contents tokenizes the datasets."""
        return _line_up(self)

    def problems(self) -> Iterator[Problem]:
        """Yields problems of the baselines' configs and of the launch."""
        if (world_size := world_size_from_env()) > 1:
            yield Problem(
                f"--nproc_per_node {world_size}",
                f"the benchmark starts processes itself; set the key nproc_per_node={world_size} instead",
            )
        yield from problems_with_folder("output_dir", self.output_dir)
        yield from self.lineup.problems


def load_base_config(name_or_path: str) -> DictConfig:
    """Loads the base config of all baselines by registered name or path; raises ValueError."""
    path = config_path(name_or_path)
    if not path.is_file():
        path = Path(name_or_path)
    shown = f"update_step_config={name_or_path}"
    if not path.is_file():
        raise ValueError(
            f"{shown}: it is neither the name of a config of this project nor a file; set it to "
            "llama3_2/5M_full_update_step or to the path of a YAML file"
        )
    try:
        loaded = OmegaConf.load(path)
    except (yaml.YAMLError, OSError) as error:
        raise ValueError(f"{shown}: {_first_line(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"{shown}: it is a list, not keys")
    return loaded


def merge(base: DictConfig, overrides: Mapping[str, Any]) -> DictConfig:
    """Merges overrides into a copy of ``base``. Components replace the whole value."""
    merged = base.copy()
    for key, value in overrides.items():
        if isinstance(value, Mapping) and "_component_" in value:
            merged[key] = OmegaConf.create(dict(value))
        else:
            merged.merge_with({key: value})
    return merged


def baseline_of(
    name: str, entry: Mapping[str, Any], base: DictConfig, settings: LineupSettings
) -> Baseline:
    """Resolves the config of a baseline from its entry of ``peers`` and the base config.

    Paths that the base config derives from ``output_dir``, such as fresh weights, are shared by all
    baselines; each baseline writes to a separate folder. Baselines of one model start from the same
    adapters: ``checkpointer.adapter_checkpoint``, or fresh ones in a shared file.
    """
    recipe, kind, output_dir = settings.update_step_recipe, entry["kind"], str(settings.output_dir)
    overrides = {key: value for key, value in entry.items() if key != "kind"}
    config = merge(merge(base, overrides), {**_FIXED, "output_dir": output_dir})
    config.pop("dataset_val", None)
    if "save_every_n_steps" not in overrides:
        config.save_every_n_steps = None
    for key, value in {**_DEFAULTS, "device": resolve_device(None).type}.items():
        config.setdefault(key, value)
    if kind == "stock":
        for key, stock in _STOCK_LOSSES[recipe].items():
            loss = str(OmegaConf.select(config, f"{key}._component_"))
            if key not in overrides and not loss.startswith(("torch.", "torchtune.")):
                config[key] = {"_component_": f"torchtune.modules.loss.{stock}"}
    config.metric_logger = {"_component_": "recipe_utils.benchmark.interleave.LossLogger"}
    if recipe == DISTILLATION:
        config.metric_logger.kd_ratio = config.get("kd_ratio", 0.5)
    of_batch = ("batch_size", "gradient_accumulation_steps", "global_batch_size")
    batch = OmegaConf.create({key: config[key] for key in of_batch if key in config})
    data = read_settings(batch, DataSettings)
    accumulated = data.num_accumulated(settings.nproc_per_node, must_divide=True)
    config.gradient_accumulation_steps = accumulated
    config.pop("global_batch_size", None)
    config.max_steps_per_epoch = settings.num_steps + SPARE_STEPS
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    # Keys used only in references are resolved; the recipe would reject them.
    known = {*keys_of(_settings_of(recipe)), *OWN_KEYS[recipe].get(kind, ())}
    plain = {str(key): value for key, value in container.items() if key in known}
    if not isinstance(plain.get("checkpointer"), dict):
        raise ValueError(f"checkpointer={plain.get('checkpointer')}: it must be a component")
    own_dir = f"{output_dir}/peers/{name}"
    checkpointer = {**plain["checkpointer"], "output_dir": own_dir}
    given = checkpointer.get("adapter_checkpoint")
    has_adapters = bool(adapters_in(plain).modules)
    draws_adapters = has_adapters and given is None
    if has_adapters and plain["seed"] is None:
        plain["seed"] = 0  # for adapters and dropout
    if draws_adapters:
        of_fresh = [plain[key] for key in ("model", "dtype", "seed", "checkpointer")]
        hashed = zlib.crc32(json.dumps(of_fresh, sort_keys=True).encode())
        checkpointer["adapter_checkpoint"] = f"{output_dir}/start_adapters/{hashed:08x}.pt"
    elif has_adapters:
        folder = str(plain["checkpointer"].get("output_dir"))
        checkpointer["adapter_checkpoint"] = str(Path(folder, str(given)))
    plain |= {"output_dir": own_dir, "checkpointer": checkpointer}
    return Baseline(name, str(kind), plain, draws_adapters, recipe)


def _line_up(settings: LineupSettings) -> Lineup:
    lineup = Lineup()
    recipe = settings.update_step_recipe
    if not settings.peers:
        lineup.problems.append(
            Problem("peers", "there are none; set it to names with a kind each, see the config")
        )
    elif settings.reference not in settings.peers:
        names = ", ".join(settings.peers)
        text = f"no entry of peers has this name; set it to one of {names}"
        lineup.problems.append(Problem("baseline", text, settings.reference))
    try:
        base = merge(load_base_config(settings.update_step_config), settings.overrides or {})
        whole = merge(base, {"output_dir": str(settings.output_dir)})
        _, wrong_keys = check_keys(whole, _settings_of(recipe))
        lineup.problems += [*wrong_keys, *_problems_with_base(base)]
    except (ValueError, OSError, OmegaConfBaseException) as error:
        lineup.problems += ConfigError(_first_line(error)).problems
        return lineup
    for name, entry in settings.peers.items():
        kind = entry.get("kind") if isinstance(entry, Mapping) else None
        if kind not in KINDS[recipe]:
            text = f"set it to one of {', '.join(KINDS[recipe])}"
            lineup.problems.append(Problem(f"peers.{name}.kind", text, kind))
            continue
        if not wrong_keys:
            _add_baseline(lineup, name, entry, base, settings)
    return lineup


_SUPPORTED = {
    "optimizer_in_bwd": (False, "it would step in every backward; set it to False"),
    "quantizer": (None, "only kind=update_step trains with it; set it to null"),
    "sft_loss_weight": (0, "only kind=update_step adds it; set it to 0"),
    "tensor_parallel_dim": (1, "only data-parallel processes are compared; set it to 1"),
    "pipeline_parallel_dim": (1, "only data-parallel processes are compared; set it to 1"),
}
"""Key of the base config -> the value that all trainers support, and the problem of others."""


def _problems_with_base(base: DictConfig) -> Iterator[Problem]:
    """Yields keys that other trainers do not support."""
    for key, (supported, text) in _SUPPORTED.items():
        if base.get(key) not in (None, supported):
            yield Problem(f"overrides.{key}", text, base[key])
    kd_loss = base.get("kd_loss") or {}
    name = str(kd_loss.get("_component_", "")).rpartition(".")[2]
    is_forward = kd_loss.get("divergence", "forward") == "forward"
    if name.startswith(("Reverse", "Symmetric")) or not is_forward:
        text = f"{name}: only losses of the forward divergence compare; set divergence=forward"
        yield Problem("overrides.kd_loss", text)
    temperature = kd_loss.get("temperature", 1)
    if temperature != 1 or kd_loss.get("teacher_temperature") not in (None, 1):
        text = "stock has no temperature; set it to 1, and teacher_temperature to null"
        yield Problem("overrides.kd_loss.temperature", text, temperature)


def _add_baseline(
    lineup: Lineup,
    name: str,
    entry: Mapping[str, Any],
    base: DictConfig,
    settings: LineupSettings,
) -> None:
    """Adds a baseline, or the reason that it cannot run, to the lineup."""
    recipe, kind = settings.update_step_recipe, entry["kind"]
    try:
        own = {"kind", *OWN_KEYS[recipe].get(kind, ())}
        given = {key: value for key, value in entry.items() if key not in own}
        merged = merge(base, {**given, "output_dir": str(settings.output_dir)})
        _, found = check_keys(merged, _settings_of(recipe))
        # Only keys of this entry: it may have replaced the reference to a key of the base config.
        if problems := [problem for problem in found if problem.root in given]:
            raise ConfigError(*problems)
        dataset = merged.get("dataset")
        is_packed = isinstance(dataset, DictConfig) and dataset.get("packed", False)
        adapters, kd_ratio = adapters_in(merged), merged.get("kd_ratio", 0.5)
        reason = why_skipped(recipe, kind, settings.nproc_per_node, is_packed, adapters, kd_ratio)
        if reason is not None:
            if name == settings.reference:
                text = f"it {reason}; set it to another entry of peers"
                lineup.problems.append(Problem("baseline", text, name))
            lineup.skipped[name] = f"skipped: {reason}"
            return
        baseline = baseline_of(name, entry, base, settings)
        contents = _contents_of(baseline, lineup, settings)
    except ConfigError as error:
        lineup.problems += [Problem(f"peers.{name}", str(each)) for each in error.problems]
    except (ValueError, OSError, OmegaConfBaseException) as error:
        lineup.problems.append(Problem(f"peers.{name}", _first_line(error)))
    else:
        lineup.baselines.append(baseline)
        lineup.contents[name] = contents


def _contents_of(
    baseline: Baseline, lineup: Lineup, settings: LineupSettings
) -> list[StepContents]:
    """Counts the contents of update steps; raises ValueError if the dataset is too small."""
    cfg = OmegaConf.create(baseline.config)
    data = ("dataset", "tokenizer", "shuffle", "batch_size", "gradient_accumulation_steps")
    for other in lineup.baselines:
        is_same = all(baseline.config[key] == other.config[key] for key in data)
        if is_same and baseline.shares_prefixes == other.shares_prefixes:
            return lineup.contents[other.name]
    tokenizer = torchtune_config.instantiate(cfg.tokenizer)
    samples = samples_in_order(cfg, tokenizer, settings.nproc_per_node)
    per_step = cfg.batch_size * cfg.gradient_accumulation_steps * settings.nproc_per_node
    if len(samples) < settings.num_steps * per_step:
        raise ValueError(
            f"num_update_steps={settings.num_update_steps}: the dataset has {len(samples)} samples, enough for "
            f"{len(samples) // per_step} update steps of {per_step}, {settings.num_warmup_steps} of them "
            "warm-up; set it lower"
        )
    count = contents_of
    if baseline.recipe == PAIRS:
        count = partial(contents_of_pairs, shares_prefixes=baseline.shares_prefixes)
    return [
        count(samples[step * per_step : (step + 1) * per_step], tokenizer.pad_id)
        for step in range(settings.num_steps)
    ]


def _first_line(error: Exception) -> str:
    """Returns the error message without the position in the config that OmegaConf appends."""
    return str(error).partition("\n")[0]
