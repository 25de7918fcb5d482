"""Proves gradients, runs the tests that need CUDA, and profiles an update step on one GPU.

    python -m recipe_utils.benchmark.gpu --out /tmp/gpu
    python -m recipe_utils.benchmark.gpu --stages profile
    python -m recipe_utils.benchmark.gpu --device cpu --small      # the same code, in tiny shapes

Weights are random or fresh; no network is needed. ``tests`` needs a checkout. Each stage (:data:`STAGES`) writes its
figures or traceback to ``results.json``. The exit code is 1 if a stage raised or a check failed.
"""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torchtune.utils import get_logger

from recipe_utils.benchmark.baselines.kinds import TEXT
from recipe_utils.benchmark.baselines.update_step import make_recipe
from recipe_utils.benchmark.lineup import line_up, merge
from recipe_utils.benchmark.report import machine_name, versions
from recipe_utils.cli.registry import ROOT, config_path
from recipe_utils.files import write_atomically

Result = dict[str, Any]
"""Figures of a stage, as JSON. ``failures``: texts of checks that failed; ``lines``: printed at the end."""
_SIZES = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64, "intermediate_dim": 128}
SMALL = {
    "model": {"vocab_size": 512, "max_seq_len": 128, **_SIZES},
    "dataset": {"num_samples": 800, "median": 20},
    "device": "cpu",
    "dtype": "fp32",
}
"""Overrides of ``llama3_2/1B_gpu_benchmark`` for CPUs."""
_TOKENIZER = (
    "tokenizer={_component_: recipe_utils.examples.docstring_tokenizer, path: '${output_dir}/tokenizer.model', "
    "docstrings_path: '${output_dir}/docstrings.json', max_seq_len: 512}"
)
_RANDOM = "{_component_: recipe_utils.check_gradient.RandomWeights, model: '${%s}', seed: 0}"
_QLORA = "model.quantize_base=True", "~checkpoint_dir", _TOKENIZER, f"checkpointer={_RANDOM % 'model'}"
_TAUGHT = "~teacher_dir", _TOKENIZER, f"teacher_checkpointer={_RANDOM % 'teacher_model'}"
_CHECKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (TEXT, "llama3_2/5M_full_update_step", ()),
    (TEXT, "qwen3/5M_full_update_step", ()),
    ("lora_finetune_update_step", "llama3_2/5M_lora_update_step", _QLORA),
    ("knowledge_distillation_update_step", "llama3_2/5M_to_1M_KD_update_step", _TAUGHT),
)
"""Recipe, config and overrides whose gradients are checked: both libraries, QLoRA, and a teacher."""
_KINDS_OF_KERNELS = {
    "attention": "flash|fmha|attention|flex",
    "products": "gemm|nvjet|cutlass|aten::(add)?b?mm",
    "copies": "memcpy|memset|copy_",
    "others": "",
}
"""Kinds of kernels and what their names contain, the first that fits."""


class Stage(NamedTuple):
    """Arguments of a stage."""

    device: torch.device
    is_small: bool
    """Tiny shapes, for CPUs."""
    scratch: Path
    """Temporary folder for the output of recipes."""


# ---- Stages -------------------------------------------------------------------------------------


def gradients(stage: Stage) -> Result:
    """Runs :mod:`recipe_utils.check_gradient` on embedded defaults with each kernel, several at a time."""
    kernels = [("fp32", "null")]
    if stage.device.type == "cuda":
        kernels = [("bf16", "varlen"), *product(("fp32", "bf16"), ("flex", "by_document"))]
    num_at_once = max((os.cpu_count() or 1) // 2, 1)

    def check(given: Any) -> tuple[str, int, str]:
        (recipe, config, overrides), (dtype, kernel) = given
        name = f"{config} {dtype} {kernel}"
        keys = {"dtype": dtype, "packed_attention": kernel, "microbatching": "packed", "device": stage.device.type}
        keys["output_dir"] = stage.scratch / name.replace("/", "_")
        command = ["-m", "recipe_utils.check_gradient", recipe, "--config", config, *overrides]
        return name, *_python([*command, *(f"{key}={value}" for key, value in keys.items())])

    with ThreadPoolExecutor(num_at_once) as pool:
        ran = list(pool.map(check, product(_CHECKS, kernels)))
    failures = [f"{name}: exit code {code}" for name, code, _ in ran if code]
    return {"output": {name: printed.splitlines() for name, _, printed in ran}, "failures": failures}


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


def profile(stage: Stage) -> Result:
    """Profiles the fourth update step of ``packed`` in ``llama3_2/1B_gpu_benchmark``: its largest kernels."""
    benchmark: Any = OmegaConf.to_container(OmegaConf.load(config_path("llama3_2/1B_gpu_benchmark")))
    base = merge(OmegaConf.create(benchmark["overrides"]), SMALL if stage.is_small else {})
    packed = line_up(TEXT, base, {"packed": benchmark["baselines"]["packed"]}, stage.scratch, 1, 4)[0]["packed"]
    cfg: Any = OmegaConf.create(packed.config)
    recipe, seconds = make_recipe(TEXT, cfg), 0.0
    is_cuda = stage.device.type == "cuda"
    synchronize = torch.cuda.synchronize if is_cuda else float  # does nothing
    with recipe.run:
        recipe.setup(cfg)
        with recipe.loader.epoch(0) as prefetched:
            steps = iter(prefetched)
            for _ in range(3):
                synchronize()
                start = time.perf_counter()
                recipe.update(next(steps))
                synchronize()
                seconds = time.perf_counter() - start
            with torch.profiler.profile() as profiler:
                recipe.update(next(steps))
                synchronize()
    recipe.__dict__.clear()
    averages: Any = profiler.key_averages()
    names_on_cpu = {each.key for each in averages if each.device_type.name == "CPU"}
    # Ranges of the CPU, such as "forward", are events of the device, too.
    kernels = [each for each in averages if not is_cuda or each.key not in names_on_cpu]
    milliseconds = {e.key: (e.self_device_time_total if is_cuda else e.self_cpu_time_total) / 1e3 for e in kernels}
    counts = {each.key: each.count for each in kernels}
    total = sum(milliseconds.values())
    by_kind = dict.fromkeys(_KINDS_OF_KERNELS, 0.0)
    for name, time_ms in milliseconds.items():
        kind = next(kind for kind, pattern in _KINDS_OF_KERNELS.items() if re.search(pattern, name, re.I))
        by_kind[kind] += time_ms
    lines = [f"{total:.1f} ms in kernels; the update step before, without the profiler: {1e3 * seconds:.1f} ms"]
    lines.append(", ".join(f"{kind} {time_ms / total:.1%}" for kind, time_ms in by_kind.items()))
    largest = sorted(milliseconds, key=milliseconds.__getitem__, reverse=True)[:10]
    lines += [f"{milliseconds[name]:9.2f} ms  {counts[name]:5} x  {name[:150]}" for name in largest]
    return {"device": machine_name(stage.device), "versions": versions(), "lines": lines, "kernels_ms": milliseconds}


STAGES: dict[str, Callable[[Stage], Result]] = {each.__name__: each for each in (gradients, tests, profile)}


# ---- The command --------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the stages, prints kernels and failures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder for results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
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
    for result in results.values():
        print("".join(f"{line}\n" for line in result.get("lines", ())), end="")
    print("\n".join(failures) or "All checks passed.")
    return 1 if failures else 0


if __name__ == "__main__":
    get_logger().setLevel(logging.WARNING)
    sys.exit(main())
