"""Proves gradients on one GPU with each kernel, and runs the tests that need CUDA, one on each core.

    python -m recipe_utils.benchmark.gpu
    python -m recipe_utils.benchmark.gpu --device cpu      # gradients only

Models are embedded defaults of both libraries, QLoRA's and one with a teacher: no network. Exit code 1: one failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch

from recipe_utils.cli.registry import ROOT

_TOKENIZER = (
    "tokenizer={_component_: recipe_utils.examples.docstring_tokenizer, path: '${output_dir}/tokenizer.model', "
    "docstrings_path: '${output_dir}/docstrings.json', max_seq_len: 512}"
)
_RANDOM = "{_component_: recipe_utils.check_gradient.RandomWeights, model: '${%s}', seed: 0}"
_QLORA = "model.quantize_base=True", "~checkpoint_dir", _TOKENIZER, f"checkpointer={_RANDOM % 'model'}"
_TAUGHT = "~teacher_dir", _TOKENIZER, f"teacher_checkpointer={_RANDOM % 'teacher_model'}"
_CHECKS = (
    ("full_finetune_update_step", "--config", "llama3_2/5M_full_update_step"),
    ("full_finetune_update_step", "--config", "qwen3/5M_full_update_step"),
    ("lora_finetune_update_step", "--config", "llama3_2/5M_lora_update_step", *_QLORA),
    ("knowledge_distillation_update_step", "--config", "llama3_2/5M_to_1M_KD_update_step", *_TAUGHT),
)
"""Arguments of :mod:`recipe_utils.check_gradient`: a recipe, a config and overrides, without files."""


def commands(device: str, scratch: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and arguments of Python of each command; ``scratch`` is a folder for output."""
    kernels = [("fp32", "null")]
    if device == "cuda":
        kernels = [("bf16", "varlen"), *product(("fp32", "bf16"), ("flex", "by_document"))]
        if (tests := ROOT.parent / "tests").is_dir():  # only in a checkout
            yield "tests", ["-m", "pytest", "--all", "-n0", "-q", "-k", "cuda", str(tests)]
    for check, (dtype, kernel) in product(_CHECKS, kernels):
        name = f"{check[2]} {dtype} {kernel}"
        keys = {"device": device, "dtype": dtype, "packed_attention": kernel, "microbatching": "packed"}
        keys["output_dir"] = f"{scratch}/{name.replace('/', '_')}"
        own = [f"{key}={value}" for key, value in keys.items()]
        yield name, ["-m", "recipe_utils.check_gradient", *check, *own]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the commands, prints their last lines, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args(arguments).device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds none; on a CPU use --device cpu")

    def run(named: tuple[str, list[str]]) -> bool:
        command, env = [sys.executable, *named[1]], {"OMP_NUM_THREADS": "1", **os.environ}
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT.parent, env=env)
        lines = (ran.stderr + ran.stdout).splitlines()[-40 if ran.returncode else -9 :]
        print("\n".join([f"{named[0]}: exit code {ran.returncode}", *lines]), flush=True)
        return ran.returncode != 0

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        num_failed = sum(pool.map(run, commands(device, scratch)))
    print(f"{num_failed} commands failed." if num_failed else "All checks passed.")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
