r"""Forecasts memory and computation of a training without weights, a GPU or other ranks.

    python -m recipe_utils.forecast full_finetune_update_step --config llama3_1/8B_full_update_step \
      --ranks 8 --memory 80GiB --tflops 990

Rank 0 makes update steps on fake tensors, which have shapes and no memory. No weights, data or
tokenizer are read, only the ``config.json`` of a model of transformers, and nothing is written.
"""

import argparse
import logging
import os
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion

from recipe_utils.check_gradient.recipe_file import parser_of, paths_of
from recipe_utils.cli.registry import RECIPES
from recipe_utils.forecast.fake_step import FakeTraining
from recipe_utils.settings.components import taken_by
from recipe_utils.settings.describe import settings_of
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.settings.read import read_settings
from recipe_utils.training.command import entry_point

USABLE, EFFICIENCY = 0.92, 0.4
"""Share of the memory that counted bytes may take, and of ``--tflops`` that update steps reach."""
_GIB = 2**30
_FORECAST = {"pipeline_parallel_dim": 1, "reference": "live"}
"""Key -> its only value that has a forecast."""
_OF_CUDA = ("compile", "enable_activation_offloading", "fsdp_cpu_offload", "fsdp")


def training_of(recipe: str, cfg: DictConfig, **changes: Any) -> FakeTraining:
    """Returns a training with rows of any length; ConfigError if it has no forecast."""
    for key, value in _FORECAST.items():
        if cfg.get(key) not in (value, None):
            raise ConfigError(Problem(key, f"it has no forecast; set it to {value}", cfg[key]))
    made, on_cuda = cfg.copy(), cfg.get("device") != "cpu"
    for key in (*_OF_CUDA, "packed_attention"):
        made.pop(key, None)
    made.update({**changes, "device": "cpu"})
    settings: Any = read_settings(made, settings_of(recipe))
    if on_cuda and taken_by(made.optimizer, {"foreach": True}) and not made.optimizer.get("fused"):
        made.optimizer.setdefault("foreach", True)  # PyTorch's default there
    if settings.data.plans_by_tokens:
        settings = replace(settings, data=replace(settings.data, max_tokens_per_microbatch=1 << 24))
    return FakeTraining(made, settings, on_cuda)


def forecast(recipe: str, cfg: DictConfig, given: argparse.Namespace) -> None:
    """Prints a table with a line for each way: with and without recomputation."""
    limit, tflops = int(USABLE * given.memory * _GIB), EFFICIENCY * (given.tflops or 0)
    is_recomputed = bool(cfg.get("enable_activation_checkpointing") or cfg.get("ac_mode"))
    without = {"ac_mode": None, "ac_option": None}
    for way in (True, False):
        made = training_of(recipe, cfg, enable_activation_checkpointing=way, **without)
        data, collator = made.settings.data, made.collator
        length = min(collator.bounds.max_seq_len or 4096, collator.bounds.limits.max_seq_len)
        # A first update step of one sample: its FLOPs, and the optimizer's state that the next ones hold.
        sample_size, _, flops = made.measure(1, length)
        most = sample_size * data.batch_size * data.num_accumulated(made.ranks.dp_degree)
        size = cfg.get("max_tokens_per_microbatch")
        size = size if isinstance(size, int) else data.batch_size * sample_size
        # Memory is linear in the positions of a microbatch, so two sizes give all others.
        count = 1 if size >= most else 2  # without accumulated gradients
        size, peak, _ = made.measure(min(size, most), length, count)
        double, above, _ = made.measure(2 * size, length, count)
        per_token = (above - peak) / (double - size)
        fits = min(int(size + (limit - peak) / per_token) // 128 * 128, most)
        if way:
            parts = ", ".join(f"{name} {each / _GIB:.2f}" for name, each in made.shares.items())
            print(f"GiB on each of {given.ranks} rank(s): {parts}")
            columns = ["MiB/token", "GiB without", f"at {size:,} tokens"]
            columns += [f"most in {given.memory:g} GiB", "GFLOP/token"]
            columns += [f"s/{most:,} tokens"] * bool(tflops)
            print(f"{'':30}", *(f"{each:>17}" for each in columns))
        row = [f"{per_token / 2**20:.3f}", f"{(peak - per_token * size) / _GIB:.2f}"]
        row += [f"{peak / _GIB:.2f}", f"{fits:,}" if fits >= sample_size else "none"]
        row += [f"{flops / sample_size / 1e9:.3g}"]
        row += [f"{flops / sample_size * most / tflops / 1e12:.3g}"] if tflops else []
        label = f"{'' if way else 'no '}recomputation{' (as configured)' * (way == is_recomputed)}"
        print(f"{label:30}", *(f"{each:>17}" for each in row), flush=True)
    ignored = "".join(f", {key}={cfg[key]}" for key in _OF_CUDA if cfg.get(key))
    print(f"Not counted: allocator, NCCL, workspaces ({1 - USABLE:.0%} of the memory){ignored}.")


def main() -> None:
    """Forecasts the recipe given on the command line."""
    parser = parser_of("python -m recipe_utils.forecast", __doc__)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the training (default 1)")
    gib = lambda text: float(text.removesuffix("GiB"))  # noqa: E731
    parser.add_argument("--memory", type=gib, default=80.0, help="of each rank (default 80GiB)")
    parser.add_argument("--tflops", type=float, help="peak of the device in dtype [TFLOP/s]")
    given, overrides = parser.parse_known_args()
    known = [name for name in RECIPES if name.endswith("update_step") and "dino" not in name]
    if given.recipe not in known:
        text = "edited files and images have no forecast; set the recipe to one of"
        parser.error(f"{given.recipe}: {text} {', '.join(known)}")
    recipe, path = paths_of(parser, given)
    sys.argv = [recipe, "--config", path, *overrides]

    # A fake process group of all ranks, of which this process is rank 0: collectives return at once.
    def start(cfg: DictConfig) -> None:
        if TorchVersion(torch.__version__) < "2.13":  # fake collectives and FLOPs are wrong
            text = "a forecast needs 2.13; install it elsewhere"
            raise ConfigError(f"torch={torch.__version__}: {text}")
        logging.disable(logging.WARNING)
        names = dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
        os.environ.update(names, **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(given.ranks)))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=given.ranks)
        try:
            forecast(recipe, cfg, given)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            text = f"its shapes depend on numbers ({error}), which fake tensors do not have"
            raise ConfigError(f"model: {text}; set another model") from error
        finally:
            dist.destroy_process_group()

    sys.exit(entry_point(start)())


if __name__ == "__main__":
    main()
