"""Proves gradients, runs the tests that need CUDA, and times update steps on one GPU.

    python -m recipe_utils.benchmark.gpu --out /tmp/gpu
    python -m recipe_utils.benchmark.gpu --stages speed
    python -m recipe_utils.benchmark.gpu --device cpu --small      # the same code, in tiny shapes

Weights and samples are random; no network is needed. ``tests`` needs a checkout. Each stage (:data:`STAGES`) writes its
figures or traceback to ``results.json``. The exit code is 1 if a stage raised or a check failed.
"""

import argparse
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch.utils.benchmark import Timer
from torchtune.utils import get_logger

from recipe_utils.benchmark.baselines.update_step import make_recipe
from recipe_utils.benchmark.report import versions
from recipe_utils.benchmark.token_audit import IGNORE_INDEX
from recipe_utils.cli.registry import ROOT, config_path
from recipe_utils.files import write_atomically
from recipe_utils.models.sizes import num_outputs
from recipe_utils.update_steps.samples import Sample

Result = dict[str, Any]
"""Figures of a stage, as JSON. ``failures``: texts of checks that failed."""
_SIZES = ("num_layers", "num_heads", "num_kv_heads", "embed_dim", "intermediate_dim")
_TINY, _1B = (1, 4, 2, 64, 128), (16, 32, 8, 2048, 8192)


class Stage(NamedTuple):
    """Arguments of a stage."""

    device: torch.device
    is_small: bool
    """Tiny shapes and few steps, for CPUs."""
    scratch: Path
    """Temporary folder for the output of recipes."""


# ---- Components without files -------------------------------------------------------------------


def random_texts(tokenizer: Any, vocab_size: int, num_samples: int) -> list[Sample]:
    """Returns samples of random tokens, of log-normal lengths (median 90). Half are targets."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    samples: list[Sample] = []
    for _ in range(num_samples):
        length = min(max(int(rng.lognormvariate(4.5, 0.8)), 8), tokenizer.max_seq_len)
        tokens = torch.randint(vocab_size, (length,), generator=generator).tolist()
        samples.append({"tokens": tokens, "labels": [IGNORE_INDEX] * (length // 2) + tokens[length // 2 :]})
    return samples


def random_recipe(stage: Stage, name: str, changes: Result) -> tuple[Any, Any]:
    """Returns the fine-tuning recipe with random weights and samples, and its config.

    ``changes`` are config keys; ``name`` is the output folder.
    """
    longest, vocab_size, num_samples = (256, 512, 64) if stage.is_small else (16384, 128256, 2048)
    model = {
        "_component_": "torchtune.models.llama3_2.llama3_2",
        "vocab_size": vocab_size,
        "max_seq_len": longest,
        "rope_base": 500_000,
        "scale_factor": 1,
        **dict(zip(_SIZES, _TINY if stage.is_small else _1B, strict=True)),
    }
    tokenizer = {"pad_id": 0, "max_seq_len": longest // 8}
    dataset = {"vocab_size": vocab_size, "num_samples": num_samples}
    # The config that users start from, with all that reads a file replaced.
    cfg: Any = OmegaConf.load(config_path("llama3_2/1B_full_update_step"))
    cfg.pop("checkpoint_dir", None)
    keys = {
        "model": model,
        "tokenizer": {"_component_": "types.SimpleNamespace", **tokenizer},
        "dataset": {"_component_": "recipe_utils.benchmark.gpu.random_texts", **dataset},
        "checkpointer": {"_component_": "recipe_utils.check_gradient.RandomWeights", "model": model, "seed": 0},
        "output_dir": str(stage.scratch / name),
        "device": stage.device.type,
        "num_workers": 0,
        "save_every_n_minutes": None,
        **changes,
    }
    for key, value in keys.items():
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    return make_recipe("full_finetune_update_step", cfg), cfg


def decoder_flops(decoder: Any, document_lengths: Sequence[int], num_targets: int) -> tuple[int, int]:
    """Counts the FLOPs of products with weights, and of causal attention, in forward and backward.

    These are 6 per weight and token (2 of them in the forward; Kaplan et al. 2020, arXiv:2001.08361,
    section 2.1), and 6 * L * d * n^2 for attention of n tokens. Embeddings, norms and recomputation
    are excluded; the output layer counts for targets only.
    """
    num_weights = sum(p.numel() for p in decoder.layers.parameters() if p.dim() > 1)
    num_output_weights = num_outputs(decoder) * decoder.tok_embeddings.embedding_dim
    width = decoder.num_heads * decoder.head_dim
    weight_flops = 6 * (num_weights * sum(document_lengths) + num_output_weights * num_targets)
    return weight_flops, 6 * len(decoder.layers) * width * sum(n * n for n in document_lengths)


# ---- Stages -------------------------------------------------------------------------------------


def gradients(stage: Stage) -> Result:
    """Runs :mod:`recipe_utils.check_gradient` on embedded defaults, with decoders of both libraries and each kernel."""
    configs, kernels = ["llama3_2/5M_full_update_step"], [("fp32", "null")]
    if stage.device.type == "cuda":
        configs += ["qwen3/5M_full_update_step"]
        kernels = [("bf16", "varlen"), *product(("fp32", "bf16"), ("flex", "by_document"))]
    result: Result = {"output": {}, "failures": []}
    for name, (dtype, kernel) in product(configs, kernels):
        keys = {"dtype": dtype, "packed_attention": kernel, "microbatching": "packed"}
        keys |= {"device": stage.device.type, "output_dir": str(stage.scratch / "gradients")}
        command = ["-m", "recipe_utils.check_gradient", "full_finetune_update_step", "--config", name]
        code, printed = _python([*command, *(f"{key}={value}" for key, value in keys.items())])
        result["output"][f"{name} {dtype} {kernel}"] = printed.splitlines()
        result["failures"] += [f"{name} {dtype} {kernel}: exit code {code}"] * bool(code)
    return result


def tests(stage: Stage) -> Result:
    """Runs the tests that need CUDA; skips them where there is no checkout or no CUDA."""
    folder = ROOT.parent / "tests"
    if stage.device.type != "cuda" or not folder.is_dir():
        return {"output": ["skipped: needs CUDA and a checkout"]}
    code, printed = _python(["-m", "pytest", "--all", "-n0", "-k", "cuda", str(folder)])
    return {"output": printed[-8000:].splitlines(), "failures": [f"pytest -k cuda: exit code {code}"] * bool(code)}


def _python(arguments: Sequence[str]) -> tuple[int, str]:
    """Runs Python beside the checkout; returns exit code and output."""
    ran = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT.parent)
    return ran.returncode, ran.stderr[-2000:] + ran.stdout


def speed(stage: Stage) -> Result:
    """Times update steps with the shapes of Llama-3.2-1B as the recipe logs them, and a product."""
    shape = [64 if stage.is_small else 8192] * 2
    left = torch.randn(shape, device=stage.device, dtype=torch.bfloat16)
    timer = Timer("left @ left", globals={"left": left}, num_threads=torch.get_num_threads())
    peak = 2 * shape[0] ** 3 / timer.blocked_autorange().median / 1e12
    ways: dict[str, dict[str, Any]] = {
        "eager": {},
        "compiled": {"compile": not stage.is_small},  # inductor takes a minute
        "chunks of 4096": {"compile": not stage.is_small, "loss.tokens_per_chunk": 4096},
    }
    num_steps = 3 if stage.is_small else 12
    rows: list[Result] = []
    for (way, keys), longest in product(ways.items(), [128] if stage.is_small else [8192, 2048, 16384]):
        keys = {"batch_size": 4, "gradient_accumulation_steps": 4, **keys}
        keys |= {"max_tokens_per_microbatch": longest, "max_steps_per_epoch": num_steps}
        name = f"{way} {longest}"
        recipe, cfg = random_recipe(stage, name, {"log_every_n_steps": 1, **keys})
        with recipe.run:
            recipe.setup(cfg)
            dataset, decoder = recipe.loader.dataset.dataset, recipe.model
            lengths = [len(sample["tokens"]) for sample in dataset]
            num_targets = sum(length - length // 2 for length in lengths)
            flops = sum(decoder_flops(decoder, lengths, num_targets)) / num_targets
            recipe.train()
        recipe.__dict__.clear()
        if stage.device.type == "cuda":
            torch.cuda.empty_cache()
        # The last steps, because compilers and allocators settle in the first ones.
        lines = (stage.scratch / name / "logs" / "metrics.jsonl").read_text().splitlines()
        logged = [step for step in map(json.loads, lines) if "tokens_per_second_per_gpu" in step]
        rate = statistics.median(step["tokens_per_second_per_gpu"] for step in logged[-8:])
        row = {"way": way, "longest_row": longest, "target_tokens_per_second": rate}
        row |= {"tflops": flops * rate / 1e12, "share_of_peak": flops * rate / 1e12 / peak}
        rows.append({**row, "peak_memory_gb": max((step.get("peak_memory_active", 0) for step in logged), default=0)})
    name = torch.cuda.get_device_name(stage.device) if stage.device.type == "cuda" else "CPU"
    return {"device": name, "versions": versions(), "product_tflops": peak, "rows": rows}


STAGES: dict[str, Callable[[Stage], Result]] = {each.__name__: each for each in (gradients, tests, speed)}


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
        stage = Stage(torch.device(args.device), args.small, Path(scratch))
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            start = time.monotonic()
            # A stage that raises does not cost the others, nor do later ones cost its results.
            try:
                results[name] = STAGES[name](stage)
            except Exception as error:
                results[name] = {"raised": traceback.format_exc()}
                failures.append(f"FAILED {name}: {type(error).__name__}: {error}")
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()
            failures += [f"FAILED {name}: {each}" for each in results[name].get("failures", ())]
            results[name]["seconds"] = time.monotonic() - start
            write_atomically(args.out / "results.json", json.dumps(results, indent=1, default=str) + "\n")
    for row in results.get("speed", {}).get("rows", ()):
        print(row.pop("way"), *(f"{name} {value:.4g}" for name, value in row.items()), sep=", ")
    print("\n".join(failures) or "All checks passed.")
    return 1 if failures else 0


if __name__ == "__main__":
    get_logger().setLevel(logging.WARNING)
    sys.exit(main())
