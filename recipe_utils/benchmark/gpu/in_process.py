"""The fine-tuning recipe in this process, as ``tune run`` has it, with configs made here."""

import gc
import json
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from recipe_utils.benchmark.gpu.measure import Settings
from recipe_utils.model.build.build import ModelSettings
from recipe_utils.parallel.ranks import Ranks, RankSettings, join_ranks
from recipe_utils.tune.registry import config_path, recipe_path

_SMALL_MODEL = {
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "intermediate_dim": 128,
}
_LLAMA_1B = {  # of Llama-3.2-1B, with plain rotary positions
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "embed_dim": 2048,
    "intermediate_dim": 8192,
}


@cache
def recipe_class() -> Any:
    """Of ``full_finetune_update_step``."""
    return runpy.run_path(str(recipe_path("full_finetune_update_step")))["FullFinetuneRecipe"]


@contextmanager
def set_up(cfg: DictConfig) -> Iterator[Any]:
    """A recipe after ``setup``; leaves its process group and frees its memory."""
    recipe = recipe_class()(cfg)
    try:
        with recipe.run:
            recipe.setup(cfg)
            recipe.model.train()
            yield recipe
    finally:
        for name in ("model", "optimizer", "lr_scheduler", "nonfinite", "pipeline"):
            recipe.__dict__.pop(name, None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def train(cfg: DictConfig) -> dict[str, list[float]]:
    """Trains to the end; for each metric, what was logged from the first update step on."""
    with set_up(cfg) as recipe:
        recipe.train()
    logged: dict[str, list[float]] = {}
    with open(f"{cfg.output_dir}/logs/metrics.jsonl") as file:
        for line in file:
            for name, value in json.loads(line).items():
                logged.setdefault(name, []).append(value)
    return logged


@contextmanager
def joined_ranks(settings: Settings) -> Iterator[Ranks]:
    """The process group of one rank that a recipe would join."""
    ranks = join_ranks(RankSettings(device=settings.device.type))
    try:
        yield ranks
    finally:
        ranks.leave()


def knows(key: str) -> bool:
    """Whether this version's models have such a key in the config."""
    return key in {field.name for field in fields(ModelSettings)}


def embedded_config(settings: Settings, name: str, /, **changes: Any) -> DictConfig:
    """The embedded 5M config on the device; tokenizer, data and fresh weights are made once.

    Args:
        settings: of the stages.
        name: of the output folder.
        changes: keys by their dotted names, with ``__`` for dots.
    """
    cfg = OmegaConf.load(config_path("llama3_2/5M_full_update_step"))
    assert isinstance(cfg, DictConfig)
    own: dict[str, Any] = {
        "output_dir": str(settings.scratch / name),
        "docstrings_path": str(settings.scratch / "docstrings.json"),
        "checkpoint_dir": str(settings.scratch / "fresh"),
        "device": settings.device.type,
        "run_val_every_n_steps": None,
    }
    if settings.is_small:
        own |= {"batch_size": 2, "gradient_accumulation_steps": 2}
        own |= {f"model.{key}": value for key, value in _SMALL_MODEL.items()}
        own |= {"model.vocab_size": 384, "model.max_seq_len": 128}
        _write_few_texts(settings.scratch / "docstrings.json")
    return _changed(cfg, own, changes)


def _write_few_texts(path: Path) -> None:
    """Docstrings of some types, where those of the whole library would take seconds to be found."""
    if path.exists():
        return
    pairs = [
        (f"What does `{kind.__name__}.{name}` do?", str(getattr(kind, name).__doc__))
        for kind in (str, bytes, int, list, dict, set)
        for name in dir(kind)
    ]
    path.write_text(json.dumps(pairs))


def crafted_config(settings: Settings, name: str, /, **changes: Any) -> DictConfig:
    """A config of the shapes of Llama-3.2-1B whose weights and samples are random, made in this process."""
    sizes = _SMALL_MODEL if settings.is_small else _LLAMA_1B
    longest_row = 256 if settings.is_small else 16384
    cfg = OmegaConf.load(config_path("llama3_2/1B_full_update_step"))
    assert isinstance(cfg, DictConfig)
    del cfg.checkpoint_dir  # which nothing refers to any more
    model = {
        "_component_": "torchtune.models.llama3_2.llama3_2",
        "vocab_size": 512 if settings.is_small else 128256,
        "max_seq_len": longest_row,
        "rope_base": 500_000,
        "scale_factor": 1,
        **sizes,
    }
    here = "recipe_utils.benchmark.gpu.crafted"
    for key, value in {
        "model": model,
        "tokenizer": {"_component_": f"{here}.NoTokenizer", "max_seq_len": longest_row // 8},
        "dataset": {"_component_": f"{here}.RandomTexts", "vocab_size": model["vocab_size"]},
        "checkpointer": {
            "_component_": f"{here}.RandomWeights",
            "model": model,
            "device": settings.device.type,
            "output_dir": str(settings.scratch / name),
        },
    }.items():
        cfg[key] = value
    own = {
        "output_dir": str(settings.scratch / name),
        "device": settings.device.type,
        "max_tokens_per_microbatch": longest_row,
        "num_workers": 0,
        "log_peak_memory_stats": False,
        "metric_logger": None,
    }
    return _changed(cfg, own, changes)


def _changed(cfg: DictConfig, *all_changes: dict[str, Any]) -> DictConfig:
    for changes in all_changes:
        for key, value in changes.items():
            OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg
