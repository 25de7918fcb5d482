"""From the benchmark's config to one resolved recipe config per peer."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from recipe_utils.benchmark.peers import (
    DISTILLATION,
    OWN_KEYS,
    PAIRS,
    STOCK_KD_LOSS,
    STOCK_LOSS,
    TEXT,
)
from recipe_utils.benchmark.start_adapters import adapters_in
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.parallel.ranks import resolve_device
from recipe_utils.settings.describe import settings_of
from recipe_utils.settings.keys import all_keys_of
from recipe_utils.settings.read import read_settings
from recipe_utils.tune.registry import config_path

ALL_PEERS = {
    "epochs": 1,
    "resume_from_checkpoint": False,
    "run_val_every_n_steps": None,
    "save_every_n_minutes": None,
    "log_every_n_steps": 1,
    "log_peak_memory_stats": False,
    "metric_logger": {"_component_": "recipe_utils.benchmark.interleave.LossLogger"},
    "profiler": None,
}
"""What a benchmark needs whatever the configs say."""
DEFAULTS = {
    "batch_size": 1,
    "compile": False,
    "dtype": "fp32",
    "enable_activation_checkpointing": False,
    "lr_scheduler": None,
    "optimizer_in_bwd": False,
    "seed": None,
    "shuffle": True,
}
"""Of keys that the stock recipes require and the update-step recipe does not."""
STOCK_LOSSES: dict[str, dict[str, dict[str, str]]] = {
    TEXT: {"loss": STOCK_LOSS},
    PAIRS: {},
    DISTILLATION: {"loss": STOCK_LOSS, "kd_loss": STOCK_KD_LOSS},
}
"""Of each recipe, what stock computes in place of losses that it does not know."""
STOCK_LOSS_LOGGER = {"_component_": "recipe_utils.benchmark.distillation_peers.StockLossLogger"}


@dataclass(frozen=True)
class Peer:
    """A peer as the benchmark starts it."""

    name: str
    kind: str
    overrides: dict[str, Any]
    """Its own, as written in the benchmark's config."""
    config: dict[str, Any]
    """Resolved, with plain containers."""
    draws_adapters: bool = False
    """Whether its ``checkpointer.adapter_checkpoint`` is to be written before it starts."""
    recipe: str = TEXT
    """The update-step recipe whose config it is."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether what both sides of a pair begin with goes into its model once."""
        is_ours = self.recipe == PAIRS and self.kind == "update_step"
        is_packed = self.config.get("microbatching") == "packed"
        return is_ours and is_packed and self.config.get("prefix_sharing") is not False


def load_base_config(name_or_path: str) -> DictConfig:
    """The config that all peers start from.

    Args:
        name_or_path: of a config that this project registers, or of a file.

    Raises:
        ValueError: there is no such config, or it cannot be read.
    """
    for path in (config_path(name_or_path), Path(name_or_path)):
        if path.is_file():
            try:
                loaded = OmegaConf.load(path)
            except (yaml.YAMLError, OSError) as error:
                first_line = str(error).partition("\n")[0]
                raise ValueError(f"update_step_config={name_or_path}: {first_line}") from error
            if isinstance(loaded, DictConfig):
                return loaded
            raise ValueError(f"update_step_config={name_or_path}: it is a list, not keys")
    raise ValueError(
        f"update_step_config={name_or_path}: it is neither the name of a config of this project nor "
        "a file; set it to llama3_2/5M_full_update_step or to the path of a YAML file"
    )


@cache
def update_step_settings(recipe: str) -> type:
    """An update-step recipe's settings."""
    return settings_of(recipe)


@cache
def update_step_keys(recipe: str) -> frozenset[str]:
    """The config keys that an update-step recipe reads."""
    return frozenset(all_keys_of(update_step_settings(recipe)))


def merge(base: DictConfig, overrides: Mapping[str, Any]) -> DictConfig:
    """``base`` with ``overrides``; one that names a component replaces what was there whole."""
    merged = base.copy()
    for key, value in overrides.items():
        if isinstance(value, Mapping) and "_component_" in value:
            merged[key] = OmegaConf.create(dict(value))
        else:
            merged.merge_with({key: value})
    return merged


def peer_of(
    name: str,
    settings: Mapping[str, Any],
    base: DictConfig,
    output_dir: str,
    num_ranks: int,
    max_steps: int,
    recipe: str = TEXT,
) -> Peer:
    """Makes a peer's config.

    What the base config derives from ``output_dir``, such as fresh weights, is shared by all peers;
    what a peer itself might write goes to a folder of its own. Peers of one model with adapters start
    from the same ones: those of ``checkpointer.adapter_checkpoint``, or fresh ones in a file that they
    share.

    Args:
        name: of the peer.
        settings: ``kind``, and overrides of ``base``.
        base: the config with the overrides for all peers.
        output_dir: of the benchmark.
        num_ranks: processes of the peer, all of them data-parallel.
        max_steps: update steps it could make.
        recipe: whose config ``base`` is.

    Raises:
        ValueError: a batch that does not divide, or no checkpointer.
        recipe_utils.settings.problems.ConfigError: a batch of wrong values.
        omegaconf.errors.OmegaConfBaseException: a config that does not resolve.
    """
    overrides = {key: value for key, value in settings.items() if key != "kind"}
    config = merge(merge(base, overrides), {**ALL_PEERS, "output_dir": output_dir})
    config.pop("dataset_val", None)
    if (
        "save_every_n_steps" not in overrides
    ):  # what it costs is of interest where a peer asks for it
        config.save_every_n_steps = None
    for key, value in {**DEFAULTS, "device": resolve_device(None).type}.items():
        config.setdefault(key, value)
    if settings["kind"] == "stock":
        for key, stock in STOCK_LOSSES[recipe].items():
            loss = str(OmegaConf.select(config, f"{key}._component_"))
            if key not in overrides and not loss.startswith(("torch.", "torchtune.")):
                config[key] = stock
    if recipe == DISTILLATION:
        config.metric_logger = {**STOCK_LOSS_LOGGER, "kd_ratio": config.get("kd_ratio", 0.5)}
    of_batch = ("batch_size", "gradient_accumulation_steps", "global_batch_size")
    batch = OmegaConf.create({key: config[key] for key in of_batch if key in config})
    config.gradient_accumulation_steps = read_settings(batch, DataSettings).num_accumulated(
        num_ranks
    )
    config.pop("global_batch_size", None)
    config.max_steps_per_epoch = max_steps
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    # Without the keys that others refer to: their values are in place, and the recipe refuses them.
    known = update_step_keys(recipe) | OWN_KEYS[recipe].get(settings["kind"], set())
    plain = {str(key): value for key, value in container.items() if key in known}
    if not isinstance(plain.get("checkpointer"), dict):
        raise ValueError(f"checkpointer={plain.get('checkpointer')}: it must be a component")
    own_dir = f"{output_dir}/peers/{name}"
    checkpointer = {**plain["checkpointer"], "output_dir": own_dir}
    draws_adapters = False
    if adapters_in(plain).modules:
        if plain["seed"] is None:
            plain["seed"] = 0  # adapters are drawn by it, and their dropout
        given = checkpointer.get("adapter_checkpoint")
        draws_adapters = given is None
        if given is None:
            of_fresh = [plain[key] for key in ("model", "dtype", "seed")] + [plain["checkpointer"]]
            hashed = zlib.crc32(json.dumps(of_fresh, sort_keys=True).encode())
            path = Path(output_dir, "start_adapters", f"{hashed:08x}.pt")
        else:
            path = Path(str(plain["checkpointer"].get("output_dir")), given)
        checkpointer["adapter_checkpoint"] = str(path)
    plain["output_dir"] = own_dir
    plain["checkpointer"] = checkpointer
    return Peer(name, str(settings["kind"]), overrides, plain, draws_adapters, recipe)
