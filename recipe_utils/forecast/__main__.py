r"""Forecasts memory and computation of a training without weights, a GPU or other ranks.

    python -m recipe_utils.forecast full_finetune_update_step --config llama3_1/8B_full_update_step \
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
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.torch_version import TorchVersion

from recipe_utils.forecast import Measured, largest_that_fits, measure, shares_of
from recipe_utils.forecast.fake_world import fake_world
from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.prove.recipe_file import OF_OUTPUT, parser_of, paths_of, redirected
from recipe_utils.run.entry_point import entry_point
from recipe_utils.settings.components import component_at
from recipe_utils.settings.describe import load_recipe
from recipe_utils.settings.keys import keys_of
from recipe_utils.settings.problems import ConfigError, Problem

USABLE, EFFICIENCY = 0.92, 0.4
"""Share of the memory that counted bytes may take, and of ``--tflops`` that update steps reach."""
_GIB, _HERE = 2**30, "recipe_utils.forecast.fake_world"
_NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
_REFUSED = {"pipeline_parallel_dim": 1, "reference": "live"}
"""Keys without a forecast, and their values that have one."""
_OF_CUDA = ("compile", "enable_activation_offloading", "fsdp_cpu_offload", "fsdp")
_OF_DATA = ("packed_attention", "loss_weights", "mixture")
_LEFT_OUT = {*OF_OUTPUT, *_OF_CUDA, *_OF_DATA}
_WAYS = {"recomputation": True, "no recomputation": False}


def config_of(cfg: DictConfig, folder: Path, keys: Mapping[str, Any]) -> DictConfig:
    """Returns a config without files for a recipe with ``keys``; ConfigError if it has no forecast."""
    for key, allowed in _REFUSED.items():
        if key in keys and cfg.get(key) not in (allowed, None):
            raise ConfigError(Problem(key, f"it has no forecast; set it to {allowed}", cfg[key]))
    raw = redirected(cfg, folder)
    left_out = _LEFT_OUT | set(re.findall(r"\$\{(\w+)", str(raw))) - keys.keys()
    made: Any = OmegaConf.to_container(OmegaConf.create(raw), resolve=True)
    made = {key: value for key, value in made.items() if key not in left_out}
    kind = "pair" if "prefix_sharing" in keys else "image" if "mask_ratio" in keys else "text"
    made |= {"device": "cpu", "dataset": {"_component_": f"{_HERE}.FakeDataset", "kind": kind}}
    with suppress(KeyError, TypeError, ValueError):  # problems that the recipe reports
        own = made["optimizer"]
        takes = inspect.signature(component_at(own["_component_"])).parameters
        if cfg.get("device") != "cpu" and "foreach" in takes and not own.get("fused"):
            own.setdefault("foreach", True)  # PyTorch's default on CUDA
        if kind == "image":
            return OmegaConf.create(made)
        for name in ("checkpointer", "ref_checkpointer", "teacher_checkpointer"):
            if made.get(name) is not None:
                model = made["teacher_model" if name.startswith("teacher") else "model"]
                made[name] = {"_component_": f"{_HERE}.FakeWeights", "model": model, "seed": 0}
        fixed = {"_component_": "types.SimpleNamespace", "pad_id": 0}
        made["tokenizer"] = {**fixed, "max_seq_len": made["tokenizer"].get("max_seq_len")}
        plans = hasattr(component_at(made["model"]["_component_"]), "recipe_defaults")
        if made.get("microbatching", "packed" if plans else "in_order") != "in_order":
            made["max_tokens_per_microbatch"] = 1 << 24  # measure() makes the rows
    return OmegaConf.create(made)


@contextmanager
def set_up(
    recipe: str, cfg: DictConfig, num_ranks: int, live: LiveBytes, **changes: Any
) -> Iterator[tuple[Any, Callable[..., Measured]]]:
    """Yields a recipe after its ``setup``, and a function that measures its update steps."""
    on_cuda = cfg.get("device") != "cpu"
    with tempfile.TemporaryDirectory() as folder, fake_world(num_ranks, live, on_cuda) as mode:
        settings, recipe_class = load_recipe(recipe)
        if recipe_class is None:
            raise ConfigError(f"recipe={recipe}: it needs one class with setup() and update()")
        own = config_of(cfg, Path(folder), keys_of(settings))
        own.update(changes)
        try:
            made = recipe_class(own)
            with made.run:
                made.setup(own)
                if hasattr(made.model, "decoder"):
                    raise ConfigError("model: images beside text have no forecast; set a decoder")
                yield made, partial(measure, made, live=live, mode=mode)
        except _NEEDS_NUMBERS as error:
            text = f"its shapes depend on numbers ({error}), which fake tensors do not have"
            raise ConfigError(f"model: {text}; set another model") from error


def sizes_of(made: Any, cfg: DictConfig) -> tuple[int, int, int]:
    """Returns the positions, or images, of a sample, a configured microbatch and an update step."""
    loader, collator, samples = made.loader, made.loader.collator, made.loader.dataset.dataset
    if "images" in collator.counts:
        return made.settings.batch_size, made.settings.batch_size, loader.samples_per_rank
    samples.length = min(collator.max_seq_len or 4096, collator.limits.max_seq_len)
    of_one = collator.collate([loader.dataset[0]]).counts["positions"]
    size, most = cfg.get("max_tokens_per_microbatch"), of_one * loader.samples_per_rank
    size = size if isinstance(size, int) else made.settings.batch_size * of_one
    return of_one, min(max(size, of_one), most), most


def forecast(recipe: str, cfg: DictConfig, given: argparse.Namespace) -> int:
    """Prints the forecast of a recipe file; returns the exit code."""
    if TorchVersion(torch.__version__) < "2.13":  # fake collectives and shapes of FLOPs are wrong
        raise ConfigError(f"torch={torch.__version__}: a forecast needs 2.13; install it elsewhere")
    logging.disable(logging.WARNING)
    is_recomputed = bool(cfg.get("enable_activation_checkpointing") or cfg.get("ac_mode"))
    if given.row:
        with set_up(recipe, cfg, given.ranks, LiveBytes()) as (made, run):
            of_one, samples = sizes_of(made, cfg)[0], made.loader.dataset.dataset
            samples.length = max(samples.length * min(given.row, of_one) // of_one, 2)
            run(min(given.row, of_one))
            print(run(given.row, num_microbatches=given.microbatches).peak)
        return 0
    limit, tflops = int(USABLE * given.memory * _GIB), EFFICIENCY * (given.tflops or 0)
    for way, recomputes in _WAYS.items():
        changes = {
            "enable_activation_checkpointing": recomputes,
            "ac_mode": None,
            "ac_option": None,
        }
        live = LiveBytes()
        with set_up(recipe, cfg, given.ranks, live, **changes) as (made, run):
            of_one, size, most = sizes_of(made, cfg)
            if size == most:  # an update step without accumulated gradients
                run = partial(run, num_microbatches=1)
            first = run(of_one)
            shares = shares_of(made, live)
            whole, double = run(size), run(2 * size)
            unit = "image" if "images" in made.loader.collator.counts else "token"
            multiple = 128 if unit == "token" else made.settings.koleo_group_size or 1
            found = largest_that_fits(run, (whole, double), limit, most, multiple)
        if way == next(iter(_WAYS)):
            parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in shares.items())
            print(f"GiB on each of {given.ranks} rank(s): {parts}")
            columns = [f"MiB/{unit}", "GiB without", f"at {whole.size:,} {unit}s"]
            columns += [f"most in {given.memory:g} GiB", f"GFLOP/{unit}"]
            columns += [f"s/{most:,} {unit}s"] * bool(tflops)
            print(f"{'':30}", *(f"{each:>17}" for each in columns))
        per_unit = (double.peak - whole.peak) / (double.size - whole.size)
        numbers = [f"{per_unit / 2**20:.3f}", f"{(whole.peak - per_unit * whole.size) / _GIB:.2f}"]
        numbers += [f"{whole.peak / _GIB:.2f}"]
        numbers += ["none" if found is None else f"{found.size:,} ({found.peak / _GIB:.2f})"]
        gflops = first.flops / first.size / 1e9
        numbers += [f"{gflops:.3g}"]
        numbers += [f"{gflops * most / tflops / 1000:.3g}"] if tflops else []
        label = way + " (as configured)" * (is_recomputed == recomputes)
        print(f"{label:30}", *(f"{each:>17}" for each in numbers), flush=True)
    ignored = "".join(f", {key}={cfg[key]}" for key in _OF_CUDA if cfg.get(key))
    print(f"Not counted: allocator, NCCL, workspaces ({1 - USABLE:.0%} of the memory){ignored}.")
    return 0


def gib(text: str) -> float:
    """Returns the number of a size such as ``80GiB``."""
    return float(text.removesuffix("GiB"))


def main() -> None:
    """Forecasts the recipe given on the command line."""
    parser = parser_of("python -m recipe_utils.forecast", __doc__)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the training (default 1)")
    parser.add_argument("--memory", type=gib, default=80.0, help="of each rank (default 80GiB)")
    parser.add_argument("--tflops", type=float, help="peak of the device in dtype [TFLOP/s]")
    parser.add_argument(
        "--row", type=int, help="prints only the peak [bytes] at rows of so many tokens"
    )
    parser.add_argument(
        "--microbatches", type=int, default=2, help="of such rows, 1 or 2 (default)"
    )
    given, overrides = parser.parse_known_args()
    recipe, path = paths_of(parser, given)
    sys.argv = [recipe, "--config", path, *overrides]
    sys.exit(entry_point(lambda cfg: forecast(recipe, cfg, given))())


if __name__ == "__main__":
    main()
