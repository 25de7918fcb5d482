"""Which peers take part in a benchmark, why others do not, and what each of their update steps should hold."""

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from functools import cached_property, partial
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic.dataclasses import dataclass
from torchtune import config

from recipe_utils.benchmark.peer_configs import (
    Peer,
    load_base_config,
    merge,
    peer_of,
    update_step_keys,
    update_step_settings,
)
from recipe_utils.benchmark.peers import KINDS, OWN_KEYS, PAIRS, why_skipped
from recipe_utils.benchmark.shared_by_peers import IGNORE_INDEX, samples_in_order
from recipe_utils.benchmark.start_adapters import adapters_in
from recipe_utils.benchmark.token_audit import StepContents, contents_of, contents_of_pairs
from recipe_utils.settings.keys import AS_WRITTEN, STRICT, Count, FilePath
from recipe_utils.settings.problems import ConfigError, Problem, problems_with_folder
from recipe_utils.settings.read import check_keys

# Update steps beyond the measured ones: what prepares data ahead shall not run out of it, since its
# last steps would be timed without any such work.
SPARE_STEPS = 4


@plain_dataclass
class Lineup:
    """The peers of a benchmark."""

    peers: list[Peer] = field(default_factory=list)
    """Those that take part."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why others do not, by name."""
    contents: dict[str, list[StepContents]] = field(default_factory=dict)
    """What each measured update step of a peer should hold, by its name."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with the config."""


@dataclass(frozen=True, config=STRICT)
class LineupSettings:
    """What is compared."""

    output_dir: FilePath
    """Where the report goes, and what the peers write."""
    update_step_config: str
    """What all peers train: a config of ``update_step_recipe``, by name or path."""
    peers: Annotated[dict[str, Any], AS_WRITTEN]
    """Name -> ``kind`` (stock, update_step, hf_trainer, trl or limit) and changes of the config for this one."""
    update_step_recipe: Literal[
        "full_finetune_update_step", "full_dpo_update_step", "knowledge_distillation_update_step"
    ] = "full_finetune_update_step"
    """Samples, pairs of answers or samples with a teacher; only of the first there is an hf_trainer."""
    overrides: Annotated[dict[str, Any], AS_WRITTEN] | None = None
    """Changes of the config for all peers."""
    baseline: str | None = None
    """Name of the peer that ratios are taken over; null is the first."""
    num_warmup_steps: Count = 1
    """Update steps of each round that are not timed; the first one holds loading."""
    num_update_steps: Count = 8
    """Timed update steps of each round."""
    nproc_per_node: Count = 1
    """Processes of each peer, all of them data-parallel."""

    @property
    def num_steps(self) -> int:
        """Update steps of each round."""
        return self.num_warmup_steps + self.num_update_steps

    @property
    def baseline_name(self) -> str:
        """Of the peer that ratios are taken over."""
        return self.baseline or next(iter(self.peers), "")

    @cached_property
    def lineup(self) -> Lineup:
        """The peers, found once: their datasets are tokenized to count what update steps hold."""
        return _line_up(self)

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the peers' configs and with this machine."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            yield Problem(
                f"--nproc_per_node {os.environ['WORLD_SIZE']}",
                f"the benchmark starts its peers' processes "
                f"itself; set nproc_per_node={os.environ['WORLD_SIZE']} as a key instead",
            )
        yield from problems_with_folder("output_dir", self.output_dir)
        for problem in self.lineup.problems:
            key, _, text = problem.partition(": ")
            yield Problem(key, text)


def _line_up(settings: LineupSettings) -> Lineup:
    lineup = Lineup()
    base, is_whole = None, False
    try:
        base = merge(load_base_config(settings.update_step_config), settings.overrides or {})
        whole = merge(base, {"output_dir": str(settings.output_dir)})
        lineup.problems += map(
            str, check_keys(whole, update_step_settings(settings.update_step_recipe))
        )
        is_whole = not lineup.problems
        lineup.problems += _problems_with_base(base)
    except (ValueError, OSError, OmegaConfBaseException) as error:
        lineup.problems.append(_first_line(error))
    if not settings.peers:
        lineup.problems.append(
            "peers: there are none; set it to names with a kind each, see the config"
        )
    elif settings.baseline_name not in settings.peers:
        lineup.problems.append(
            f"baseline={settings.baseline_name}: no peer has this name; set it to one of "
            f"{', '.join(settings.peers)}"
        )
    if base is not None:
        for name, of_peer in settings.peers.items():
            recipe = settings.update_step_recipe
            lineup.problems += _problems_with_keys(name, of_peer, base, recipe)
            if is_whole and _kind_of(of_peer) in KINDS[recipe]:
                _add_peer(lineup, name, of_peer, base, settings)
    return lineup


def _problems_with_base(base: DictConfig) -> Iterator[str]:
    if base.get("optimizer_in_bwd", False):
        yield (
            "overrides.optimizer_in_bwd=True: it steps in every backward, so update steps could not "
            "be told apart; set it to False"
        )
    if base.get("quantizer") is not None:
        yield (
            f"overrides.quantizer={base.quantizer.get('_component_')}: only kind=update_step trains with "
            "it; set it to null"
        )
    if base.get("sft_loss_weight", 0) != 0:
        yield (
            f"overrides.sft_loss_weight={base.sft_loss_weight}: only kind=update_step adds it; set it to 0"
        )
    kd_loss = base.get("kd_loss") or {}
    is_forward = kd_loss.get("divergence", "forward") == "forward"
    of_stock = str(kd_loss.get("_component_", "")).rpartition(".")[2]
    if of_stock.startswith(("Reverse", "Symmetric")) or not is_forward:
        yield (
            f"overrides.kd_loss={of_stock}: losses are compared of the forward divergence only; set "
            "divergence=forward"
        )
    if kd_loss.get("temperature", 1) != 1 or kd_loss.get("teacher_temperature") not in (None, 1):
        yield (
            "overrides.kd_loss.temperature: torchtune's recipe has none; set it to 1, and "
            "teacher_temperature to null"
        )
    for key in ("tensor_parallel_dim", "pipeline_parallel_dim"):
        if base.get(key, 1) != 1:
            yield (
                f"overrides.{key}={base[key]}: the benchmark compares data-parallel processes only; "
                "set it to 1"
            )


def _problems_with_keys(name: str, of_peer: Any, base: DictConfig, recipe: str) -> Iterator[str]:
    kind = _kind_of(of_peer)
    if kind not in KINDS[recipe]:
        yield f"peers.{name}.kind={kind}: set it to one of {', '.join(KINDS[recipe])}"
        return
    known = {"kind", *update_step_keys(recipe), *OWN_KEYS[recipe].get(kind, ())}
    given = {str(key): value for key, value in of_peer.items()}
    for key in sorted(given.keys() - known - set(map(str, base))):
        similar = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {similar[0]}?" if similar else "take it out"
        yield f"peers.{name}.{key}={given[key]}: kind={kind} has no such key; {hint}"


def _kind_of(of_peer: Any) -> str:
    return str(of_peer.get("kind") if isinstance(of_peer, Mapping) else None)


def _add_peer(
    lineup: Lineup,
    name: str,
    of_peer: Mapping[str, Any],
    base: DictConfig,
    settings: LineupSettings,
) -> None:
    """Adds a peer to the lineup, or why it cannot run."""
    try:
        merged = merge(base, {k: v for k, v in of_peer.items() if k != "kind"})
        dataset = merged.get("dataset")
        is_packed = isinstance(dataset, DictConfig) and dataset.get("packed", False)
        adapters = adapters_in(merged)
        recipe, kind = settings.update_step_recipe, of_peer["kind"]
        kd_ratio = merged.get("kd_ratio", 0.5)
        reason = why_skipped(recipe, kind, settings.nproc_per_node, is_packed, adapters, kd_ratio)
        if reason is not None:
            if name == settings.baseline_name:
                lineup.problems.append(f"baseline={name}: it {reason}; set it to another peer")
            lineup.skipped[name] = f"skipped: {reason}"
            return
        peer = peer_of(
            name,
            of_peer,
            base,
            str(settings.output_dir),
            settings.nproc_per_node,
            settings.num_steps + SPARE_STEPS,
            recipe,
        )
        of_recipe = {key: peer.config[key] for key in peer.config.keys() & update_step_keys(recipe)}
        if problems := check_keys(OmegaConf.create(of_recipe), update_step_settings(recipe)):
            raise ConfigError(*problems)
        contents = _contents_of(peer, lineup, settings)
    except ConfigError as error:
        lineup.problems += [f"peers.{name}: {problem}" for problem in error.problems]
    except (ValueError, OSError, OmegaConfBaseException) as error:
        lineup.problems.append(f"peers.{name}: {_first_line(error)}")
    else:
        lineup.peers.append(peer)
        lineup.contents[name] = contents


def _contents_of(peer: Peer, lineup: Lineup, settings: LineupSettings) -> list[StepContents]:
    """What each measured update step of the peer should hold.

    Raises:
        ValueError: the dataset is too small.
    """
    cfg = OmegaConf.create(peer.config)
    data = ("dataset", "tokenizer", "shuffle", "batch_size", "gradient_accumulation_steps")
    for other in lineup.peers:
        is_same = all(peer.config[key] == other.config[key] for key in data)
        if is_same and peer.shares_prefixes == other.shares_prefixes:
            return lineup.contents[other.name]
    tokenizer = config.instantiate(cfg.tokenizer)
    samples = samples_in_order(cfg, tokenizer, settings.nproc_per_node)
    per_step = cfg.batch_size * cfg.gradient_accumulation_steps * settings.nproc_per_node
    if len(samples) < settings.num_steps * per_step:
        raise ValueError(
            f"num_update_steps={settings.num_update_steps}: the dataset's {len(samples)} samples hold "
            f"{len(samples) // per_step} update steps of {per_step}, {settings.num_warmup_steps} of them "
            "warm-up; set it lower"
        )
    count = contents_of
    if peer.recipe == PAIRS:
        count = partial(contents_of_pairs, shares_prefixes=peer.shares_prefixes)
    return [
        count(samples[step * per_step : (step + 1) * per_step], tokenizer.pad_id, IGNORE_INDEX)
        for step in range(settings.num_steps)
    ]


def _first_line(error: Exception) -> str:
    """OmegaConf's errors go on with where they were raised."""
    return str(error).partition("\n")[0]
