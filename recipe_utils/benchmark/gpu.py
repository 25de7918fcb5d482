"""Runs checks and measurements that need one GPU.

    python -m recipe_utils.benchmark.gpu --out /tmp/gpu
    python -m recipe_utils.benchmark.gpu --stages machine,speed
    python -m recipe_utils.benchmark.gpu --device cpu --small      # the same code, in tiny shapes

Weights and samples are random; no files or network are needed. Each stage (:data:`STAGES`) writes
its figures or traceback to ``results.json``. The exit code is 1 if a stage raised or a check failed.
"""

import argparse
import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchtune import config as torchtune_config
from torchtune import training
from torchtune.utils import get_logger

from recipe_utils.benchmark.baselines.update_step import make_recipe
from recipe_utils.benchmark.matrix_peak import Product, decoder_flops, median_seconds, tflops
from recipe_utils.benchmark.report import versions
from recipe_utils.benchmark.token_audit import IGNORE_INDEX
from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.checkpoint.save import CheckpointWriter
from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.data.loader.samples import Sample
from recipe_utils.data.loader.to_device import to_device_ahead
from recipe_utils.data.text.collate import collate_packed_microbatch
from recipe_utils.files import write_atomically
from recipe_utils.model.build.build import ModelSettings, build_on_meta
from recipe_utils.tune.registry import config_path

Result = dict[str, Any]
"""Figures of a stage, as JSON. ``checks``: name -> (found value, upper bound)."""
_HERE = "recipe_utils.benchmark.gpu"
_COMPONENT = "torchtune.models.llama3_2.llama3_2"
_SIZES = ("num_layers", "num_heads", "num_kv_heads", "embed_dim", "intermediate_dim")
_TINY = dict(zip(_SIZES, (1, 4, 2, 64, 128), strict=True))
_1B = dict(zip(_SIZES, (16, 32, 8, 2048, 8192), strict=True))
_PRODUCTS = (
    Product(8192, 8192, 8192),
    # Llama-3.2-1B: a layer over 8192 tokens, outputs of 2048 targets, an MLP weight's gradient.
    Product(8192, 2048, 2048),
    Product(8192, 2048, 8192),
    Product(2048, 2048, 128256),
    Product(8192, 8192, 2048, is_transposed=True),
)
_BUSY_CYCLES = 2_000_000  # about a millisecond


class Run(NamedTuple):
    """Arguments of a stage."""

    device: torch.device
    is_small: bool
    """Tiny shapes and few steps, for CPUs."""
    scratch: Path
    """Temporary folder for the output of recipes."""

    @property
    def is_cuda(self) -> bool:
        """True on CUDA."""
        return self.device.type == "cuda"


# ---- Components without files -------------------------------------------------------------------


class RandomWeights:
    """Checkpointer with normal weights of standard deviation 0.02; norms are 1."""

    def __init__(self, model: Mapping[str, Any], device: str, **_: Any) -> None:
        self.model, self._device = dict(model), device

    def load_checkpoint(self) -> dict[str, Any]:
        """Returns weights in bf16: fp32 weights of a model that just fits would not fit."""
        make = partial(torchtune_config.instantiate, OmegaConf.create(self.model))
        generator = torch.Generator(self._device).manual_seed(0)
        weights = {}
        for name, like in build_on_meta(make, ModelSettings()).state_dict().items():
            weights[name] = torch.ones(like.shape, dtype=torch.bfloat16, device=self._device)
            if like.dim() > 1:
                weights[name].normal_(std=0.02, generator=generator)
        return {training.MODEL_KEY: weights}

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Does nothing."""


def random_texts(tokenizer: Any, vocab_size: int, num_samples: int = 64) -> list[Sample]:
    """Returns samples of random tokens. The second half of each is targets."""
    lengths = document_lengths(num_samples * 200, tokenizer.max_seq_len, seed=1)
    return [sample_of(lengths[i], vocab_size, i) for i in range(num_samples)]


def document_lengths(num_tokens: int, longest: int, seed: int) -> list[int]:
    """Returns log-normal lengths (median 90, as of instructions) that sum to ``num_tokens``."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        lengths.append(min(max(int(rng.lognormvariate(4.5, 0.8)), 8), longest, left))
    return lengths


def sample_of(length: int, vocab_size: int, seed: int) -> Sample:
    """Returns random tokens; the first half of the labels is ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return {"tokens": tokens, "labels": [IGNORE_INDEX] * (length // 2) + tokens[length // 2 :]}


def update_step(run: Run, rows: list[list[int]], vocab_size: int) -> UpdateStep:
    """Returns an update step with one packed row, of given document lengths, per microbatch."""
    packed = []
    for lengths in rows:
        samples = [sample_of(length, vocab_size, i) for i, length in enumerate(lengths)]
        row = collate_packed_microbatch(samples, IGNORE_INDEX)
        packed.append(row.pin_memory() if run.is_cuda else row)
    totals = {name: sum(row.counts[name] for row in packed) for name in packed[0].counts}
    return UpdateStep(0, packed, totals, dp_degree=1)


@contextmanager
def recipe_after_setup(run: Run, name: str, **changes: Any) -> Iterator[Any]:
    """Sets up the fine-tuning recipe with random weights and samples; frees it afterwards.

    ``changes`` are config keys with ``__`` for dots; ``name`` is the output folder.
    """
    longest, vocab_size = (256, 512) if run.is_small else (16384, 128256)
    device, output_dir = run.device.type, str(run.scratch / name)
    sizes = {"vocab_size": vocab_size, "max_seq_len": longest, **(_TINY if run.is_small else _1B)}
    sizes["num_layers"] = changes.pop("model__num_layers", sizes["num_layers"])
    model = {"_component_": _COMPONENT, "rope_base": 500_000, "scale_factor": 1, **sizes}
    tokenizer = {"pad_id": 0, "max_seq_len": longest // 8}
    weights = {"model": model, "device": device, "output_dir": output_dir}
    cfg: Any = OmegaConf.load(config_path("llama3_2/1B_full_update_step"))
    cfg.pop("checkpoint_dir", None)
    own = {
        "model": model,
        "tokenizer": {"_component_": "types.SimpleNamespace", **tokenizer},
        "dataset": {"_component_": f"{_HERE}.random_texts", "vocab_size": vocab_size},
        "checkpointer": {"_component_": f"{_HERE}.RandomWeights", **weights},
        "output_dir": output_dir,
        "device": device,
        "num_workers": 0,
        "max_tokens_per_microbatch": longest,
        "save_every_n_minutes": None,
    }
    for key, value in {**own, **changes}.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False, force_add=True)
    recipe = make_recipe("full_finetune_update_step", cfg)
    try:
        with recipe.run:
            recipe.setup(cfg)
            recipe.model.train()
            yield recipe
    finally:
        recipe.__dict__.clear()
        if run.is_cuda:
            torch.cuda.empty_cache()


# ---- Stages -------------------------------------------------------------------------------------


def machine(run: Run) -> Result:
    """Measures copies [GB/s] and bf16 products [TFLOP/s]; the fastest is the peak."""
    num_bytes = 2**16 if run.is_small else 2**30
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=run.device)
    hosts = {"pageable": torch.empty(num_bytes, dtype=torch.uint8)}
    if run.is_cuda:
        hosts["pinned"] = hosts["pageable"].pin_memory()
    bandwidth = {}
    for kind, host in hosts.items():
        for name, to, source in (("to", on_device, host), ("from", host, on_device)):
            copy = partial(to.copy_, source, non_blocking=True)
            seconds = median_seconds(copy, run.device, 1, 5)
            bandwidth[f"{name} device, {kind}"] = num_bytes / 1e9 / seconds
    products = (Product(64, 64, 64), Product(64, 64, 32, True)) if run.is_small else _PRODUCTS
    found = {each.name: tflops(each, run.device, torch.bfloat16, 3, 10) for each in products}
    name = torch.cuda.get_device_name(run.device) if run.is_cuda else "CPU"
    return {"device": name, "versions": versions(), "copy_gb_per_second": bandwidth,
            "products_tflops": found, "matrix_peak_tflops": max(found.values())}  # fmt: skip


def gradients(run: Run) -> Result:
    """Runs :mod:`recipe_utils.prove` on embedded defaults, with decoders of both libraries and each kernel."""
    configs, kernels = ["llama3_2/5M_full_update_step"], [("fp32", "null")]
    if run.is_cuda:
        configs += ["qwen3/5M_full_update_step"]
        kernels = [("bf16", "varlen"), *product(("fp32", "bf16"), ("flex", "by_document"))]
    found: Result = {"output": {}, "checks": {}}
    for name, (dtype, kernel) in product(configs, kernels):
        keys = {"dtype": dtype, "packed_attention": kernel, "microbatching": "packed"}
        keys |= {"device": run.device.type, "output_dir": str(run.scratch / "gradients")}
        command = [sys.executable, "-m", "recipe_utils.prove", "full_finetune_update_step"]
        command += ["--config", name, *(f"{key}={value}" for key, value in keys.items())]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        found["output"][f"{name} {dtype} {kernel}"] = (ran.stderr[-2000:] + ran.stdout).splitlines()
        found["checks"][f"{name} {dtype} {kernel}: exit code"] = (ran.returncode, 0)
    return found


def copies(run: Run) -> Result:
    """Counts wrong checksums of tensors copied ahead while the device is busy.

    Host buffers are released while they are being copied.
    """
    num_microbatches, longest = (20, 1_000) if run.is_small else (200, 1_000_000)
    expected: list[int] = []

    def made() -> Iterator[Tensor]:
        for seed in range(num_microbatches):
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(2**20, (longest - 1000 * (seed % 2) // 2,), generator=generator)
            expected.append(int(tokens.sum()))
            yield tokens.pin_memory() if run.is_cuda else tokens

    sums = []
    for tokens in to_device_ahead(made(), run.device):
        if run.is_cuda:
            torch.cuda._sleep(_BUSY_CYCLES)
        sums.append(tokens.sum())
        del tokens
        torch.full((longest,), -1, device=run.device)  # overwrites a block that is released early
    num_wrong = sum(int(a) != b for a, b in zip(sums, expected, strict=True))
    return {"checks": {f"wrong of {num_microbatches}": (num_wrong, 0)}}


def waits(run: Run) -> Result:
    """Lists device synchronizations in a warm ``update``; null without CUDA."""
    where: list[str] = []

    def keep(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            where.append("".join(traceback.format_stack(limit=8)))

    with (
        recipe_after_setup(run, "waits", batch_size=2, gradient_accumulation_steps=2) as recipe,
        recipe.loader.epoch(0) as steps,
        warnings.catch_warnings(),
    ):
        update_steps = iter(steps)
        for step in islice(update_steps, 3):
            recipe.update(step)
        step = next(update_steps)
        warnings.simplefilter("always")
        warnings.showwarning = keep
        if run.is_cuda:
            torch.cuda.synchronize(run.device)
            torch.cuda.set_sync_debug_mode("warn")
        try:
            recipe.update(step)
        finally:
            if run.is_cuda:
                torch.cuda.set_sync_debug_mode("default")
    if not run.is_cuda:
        return {"waits": None}
    return {"waits": where, "checks": {"host waits in update": (len(where), 0)}}


def speed(run: Run) -> Result:
    """Times update steps of at least 16384 tokens with the shapes of Llama-3.2-1B."""
    ways: dict[str, dict[str, Any]] = {
        "eager": {},
        "compiled": {"compile": not run.is_small},  # inductor takes a minute
        "chunks of 4096": {"compile": not run.is_small, "loss__tokens_per_chunk": 4096},
    }
    repeats = (1, 2) if run.is_small else (3, 10)
    rows: list[Result] = []
    for name, keys in ways.items():
        with recipe_after_setup(run, name, **keys) as recipe:
            for length in [128] if run.is_small else [8192, 2048, 16384]:
                longest = recipe.tokenizer.max_seq_len
                num_rows = 2 if run.is_small else 16384 // length
                of_rows = [document_lengths(length, longest, seed) for seed in range(num_rows)]
                step = update_step(run, of_rows, recipe.model.tok_embeddings.num_embeddings)
                if run.is_cuda:
                    torch.cuda.reset_peak_memory_stats(run.device)
                seconds = median_seconds(partial(recipe.update, step), run.device, *repeats)
                memory = torch.cuda.max_memory_allocated(run.device) if run.is_cuda else 0
                lengths = [n for row in of_rows for n in row]
                flops = decoder_flops(recipe.model, lengths, step.totals["target_tokens"])
                rows.append(
                    {
                        "way": name,
                        "row_length": length,
                        "milliseconds": seconds * 1e3,
                        "tokens_per_second": step.totals["real_tokens"] / seconds,
                        "tflops": sum(flops) / seconds / 1e12,
                        "peak_memory_gb": memory / 1e9,
                    }
                )
    return {"rows": rows}


def checkpoint(run: Run) -> Result:
    """Measures the time that a save blocks, and compares fp32 losses after resuming."""
    found: Result = {"blocked_seconds": {}, "checks": {}}
    with recipe_after_setup(run, "blocked") as recipe:
        recipe.update(update_step(run, [[64, 64]], 512))
        for is_async, names in ((False, ["sync"]), (True, ["async, first", "async, second"])):
            folder = run.scratch / "checkpoints"
            writer = CheckpointWriter(folder, keep_last_n=1, asynchronous=is_async)
            for number, name in enumerate(names):
                writer.wait()  # an earlier save is not part of this one's time
                state = TrainingState("benchmark", number, epoch=0, samples_consumed=0, seed=0)
                start = time.perf_counter()
                writer.save(recipe.model, recipe.optimizer, state)
                found["blocked_seconds"][name] = time.perf_counter() - start
            writer.close()
            shutil.rmtree(folder, ignore_errors=True)
    keys = {"dtype": "fp32", "weights_dtype": None, "batch_size": 2, "gradient_accumulation_steps": 2,
            "max_steps_per_epoch": 4, "save_every_n_steps": 2, "keep_last_n_checkpoints": None}  # fmt: skip
    whole = _losses(run, "whole", **keys)
    shutil.copytree(run.scratch / "whole" / "step_2", run.scratch / "resumed" / "step_2")
    resumed = _losses(run, "resumed", resume_from_checkpoint=True, **keys)
    num_different = sum(a != b for a, b in zip(resumed, whole[2:], strict=True))
    found["checks"]["losses that differ after resuming"] = (num_different, 0)
    return found


def _losses(run: Run, name: str, **keys: Any) -> list[float]:
    with recipe_after_setup(run, name, **keys) as recipe:
        recipe.train()
    lines = (run.scratch / name / "logs" / "metrics.jsonl").read_text().splitlines()
    return [metrics["loss"] for metrics in map(json.loads, lines) if "loss" in metrics]


STAGES: dict[str, Callable[[Run], Result]] = {
    each.__name__: each for each in (machine, gradients, copies, waits, speed, checkpoint)
}


# ---- The command --------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the stages, prints speeds and failures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder for results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes and few steps")
    parser.add_argument("--stages", default=",".join(STAGES), help="names, separated by commas")
    args = parser.parse_args(arguments)
    names = args.stages.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"--stages: there is no {', '.join(unknown)}; there are {', '.join(STAGES)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds none; on a CPU use --device cpu --small")
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {}
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gpu_benchmark_") as scratch:
        run = Run(torch.device(args.device), args.small, Path(scratch))
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            start = time.monotonic()
            try:
                results[name] = STAGES[name](run)
            except Exception as error:
                results[name] = {"raised": traceback.format_exc()}
                failures.append(f"FAILED {name}: {type(error).__name__}: {error}")
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()
            for check, (found, bound) in results[name].get("checks", {}).items():
                if not found <= bound:
                    failures.append(f"FAILED {name}: {check}: {found}, bound {bound}")
            results[name]["seconds"] = time.monotonic() - start
            text = json.dumps(results, indent=1, default=str)
            write_atomically(args.out / "results.json", f"{text}\n".encode())
    peak = results.get("machine", {}).get("matrix_peak_tflops", float("nan"))
    for row in results.get("speed", {}).get("rows", ()):
        figures = [f"{name} {value:.4g}" for name, value in row.items() if name != "way"]
        print(row["way"], *figures, f"share of the peak {row['tflops'] / peak:.1%}", sep=", ")
    print("\n".join(failures) or "All checks passed.")
    return 1 if failures else 0


if __name__ == "__main__":
    get_logger().setLevel(logging.WARNING)
    sys.exit(main())
