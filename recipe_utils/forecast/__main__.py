"""Forecasts memory and computation of a training without weights, a GPU or other ranks.

    python -m recipe_utils.forecast full_finetune_update_step --config llama3_1/8B_full_update_step \\
      --ranks 8 --memory 80GiB --tflops 990

The recipe file's own ``setup`` and ``update`` run on fake tensors, which have shapes and no memory.
Rank 0 of ``--ranks`` is measured, with and without recomputation; all tokens are targets. No weights,
data or tokenizer are read, only the ``config.json`` of a model of transformers, and nothing is
written to ``output_dir``.
"""

import argparse
import inspect
import logging
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from recipe_utils.forecast import Measured, largest_that_fits, measure, shares_of
from recipe_utils.forecast.fake_world import fake_world
from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.prove.recipe_file import OF_OUTPUT, class_of, parser_of, paths_of, redirected
from recipe_utils.run.entry_point import entry_point
from recipe_utils.settings.components import component_at
from recipe_utils.settings.problems import ConfigError, Problem

USABLE, EFFICIENCY = 0.92, 0.4
"""Share of the memory that counted bytes may take, and of ``--tflops`` that update steps reach."""
_GIB, _MIB = 2**30, 2**20
_NEEDS_NUMBERS = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException,
)  # fmt: skip
_REFUSED = {"pipeline_parallel_dim": 1, "reference": "live", "teacher_cache": None}
"""Keys without a forecast, and their values that have one."""
_OF_CUDA = (
    "compile", "enable_activation_offloading", "fsdp_cpu_offload", "fsdp", "packed_attention",
)  # fmt: skip
_LEFT_OUT = (*OF_OUTPUT, *_OF_CUDA, "loss_weights", "mixture", "teacher_tokenizer")
_WAYS: dict[str, dict[str, Any]] = {
    "recomputation": {"enable_activation_checkpointing": True, "ac_mode": None, "ac_option": None},
    "no recomputation": {
        "enable_activation_checkpointing": False, "ac_mode": None, "ac_option": None,
    },
}  # fmt: skip
_HERE = "recipe_utils.forecast.fake_world"
Run = Callable[[int], Measured]


def config_of(cfg: DictConfig, folder: Path, keys: Mapping[str, Any]) -> DictConfig:
    """Returns a config without files for a recipe with ``keys``; ConfigError if it has no forecast."""
    for key, allowed in _REFUSED.items():
        if key in keys and cfg.get(key) not in (allowed, None):
            instead = "null" if allowed is None else allowed
            raise ConfigError(Problem(key, f"it has no forecast; set it to {instead}", cfg[key]))
    raw = redirected(cfg, folder)
    referenced = set(re.findall(r"\$\{(\w+)", str(raw))) - keys.keys()
    resolved: Any = OmegaConf.to_container(OmegaConf.create(raw), resolve=True)
    made = {k: v for k, v in resolved.items() if k not in {*_LEFT_OUT, *referenced}}
    kind = "pair" if "prefix_sharing" in keys else "image" if "mask_ratio" in keys else "text"
    made |= {"device": "cpu", "dataset": {"_component_": f"{_HERE}.FakeDataset", "kind": kind}}
    for name in ("checkpointer", "ref_checkpointer", "teacher_checkpointer"):
        if kind != "image" and made.get(name) is not None:
            model = made["teacher_model" if name.startswith("teacher") else "model"]
            made[name] = {"_component_": f"{_HERE}.FakeWeights", "model": model, "seed": 0}
    if kind != "image":
        longest = made["tokenizer"].get("max_seq_len")
        tokenizer = {"_component_": "types.SimpleNamespace", "pad_id": 0, "max_seq_len": longest}
        own = getattr(component_at(made["model"]["_component_"]), "recipe_defaults", {})
        if made.get("microbatching", "packed" if own else "in_order") != "in_order":
            made["max_tokens_per_microbatch"] = 1 << 24  # measure() makes the rows
        made["tokenizer"] = tokenizer
    optimizer = made["optimizer"]
    takes = inspect.signature(component_at(optimizer["_component_"])).parameters
    if cfg.get("device") != "cpu" and "foreach" in takes and not optimizer.get("fused"):
        optimizer.setdefault("foreach", True)  # PyTorch's default on CUDA
    return OmegaConf.create(made)


@contextmanager
def set_up(
    recipe: str, cfg: DictConfig, num_ranks: int, live: LiveBytes, **changes: Any
) -> Iterator[tuple[Any, Run]]:
    """Yields a recipe after its ``setup``, and what measures its update steps."""
    with tempfile.TemporaryDirectory() as folder, fake_world(num_ranks, live) as mode:
        names = runpy.run_path(recipe)
        keys = names["Settings"].__dataclass_fields__
        own = config_of(cfg, Path(folder), keys)
        own.update(changes)
        try:
            made = class_of(names, recipe)(own)
            with made.run:
                made.setup(own)
                if hasattr(getattr(made.model, "_orig_mod", made.model), "decoder"):
                    raise ConfigError(
                        "model: images beside text have no forecast; set a text model"
                    )
                yield made, partial(measure, made, live=live, mode=mode)
        except _NEEDS_NUMBERS as error:
            text = f"its shapes depend on numbers ({error}), which a forecast does not have"
            raise ConfigError(f"model: {text}") from error


def sizes_of(made: Any, cfg: DictConfig) -> tuple[int, int, int]:
    """Returns a sample's positions, those of the configured microbatch, and of an update step; or images."""
    loader = made.loader
    if "images" in loader.collator.counts:
        return made.settings.batch_size, made.settings.batch_size, loader.samples_per_rank
    collator, samples = loader.collator, loader.dataset.dataset
    samples.length = min(collator.max_seq_len or 4096, collator.limits.max_seq_len)
    of_one = collator.collate([loader.dataset[0]]).counts["positions"]
    given = cfg.get("max_tokens_per_microbatch")
    size = given if isinstance(given, int) else made.settings.batch_size * of_one
    most = of_one * loader.samples_per_rank
    return of_one, min(size, most), most


def forecast(recipe: str, cfg: DictConfig, given: argparse.Namespace) -> int:
    """Prints the forecast of a recipe file; returns the exit code."""
    logging.disable(logging.WARNING)
    is_recomputed = bool(cfg.get("enable_activation_checkpointing") or cfg.get("ac_mode"))
    limit = int(USABLE * given.memory * _GIB)
    for number, (label, keys) in enumerate(_WAYS.items()):
        live = LiveBytes()
        with set_up(recipe, cfg, given.ranks, live, **keys) as (made, run):
            of_one, size, most = sizes_of(made, cfg)
            first = run(of_one)  # makes the optimizer's state
            shares = shares_of(made, live)
            unit = "image" if "images" in made.loader.collator.counts else "token"
            half, whole = run(max(size // 2, 1)), run(size)
            per_unit = (whole.peak - half.peak) / max(whole.size - half.size, 1)
            multiple = 128 if unit == "token" else made.settings.koleo_group_size or 1
            found = largest_that_fits(run, (half, whole), limit, most, multiple)
        if number == 0:
            ranks = f"each of {given.ranks} ranks" if given.ranks > 1 else "one rank"
            parts = (f"{key} {value / _GIB:.2f}" for key, value in shares._asdict().items())
            print(f"GiB on {ranks}: {', '.join(parts)}", flush=True)
        fits = "no" if found is None else f"{found.size:,} ({found.peak / _GIB:.1f} GiB)"
        parts = [
            f"{(whole.peak - per_unit * whole.size) / _GIB:.2f} GiB + {per_unit / _MIB:.3f} MiB per {unit}",
            f"{whole.peak / _GIB:.2f} GiB at {whole.size:,}",
            f"largest in {given.memory:g} GiB {fits}",
            f"{first.flops / first.size / 1e9:.3g} GFLOP per target {unit}",
        ]
        if given.tflops:
            seconds = first.flops / first.size * most / (EFFICIENCY * given.tflops * 1e12)
            parts.append(f"{seconds:.3g} s per update step of {most:,} {unit}s per rank")
        configured = " (as configured)" * (is_recomputed == (label == "recomputation"))
        print(f"{label}{configured}: {'; '.join(parts)}", flush=True)
    return 0


def main() -> None:
    """Forecasts the recipe given on the command line."""

    def memory(text: str) -> float:
        return float(re.fullmatch(r"([\d.]+) *(GiB)?", text)[1])  # type: ignore[index]

    parser = parser_of("python -m recipe_utils.forecast", __doc__)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the training (default 1)")
    parser.add_argument("--memory", type=memory, default=80.0, help="of each rank (default 80GiB)")
    parser.add_argument("--tflops", type=float, help="peak of the device in dtype [TFLOP/s]")
    given, overrides = parser.parse_known_args()
    recipe, path = paths_of(parser, given)
    sys.argv = [recipe, "--config", path, *overrides]
    sys.exit(entry_point(lambda cfg: forecast(recipe, cfg, given))())


if __name__ == "__main__":
    main()
