"""Stages 0 and 1: what the machine is and can do at best, and the process group that a recipe joins."""

import platform
import shutil
import subprocess
import sysconfig
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from recipe_utils.benchmark.gpu.in_process import joined_ranks
from recipe_utils.benchmark.gpu.measure import Result, Settings, check, median_seconds
from recipe_utils.benchmark.matrix_peak import Product, tflops
from recipe_utils.parallel.process_group import mean_over_ranks

_PACKAGES = ("torch", "torchtune", "torchao", "triton", "numpy", "omegaconf", "pydantic")


_PRODUCTS = (
    Product(8192, 8192, 8192),
    # Of a Llama-3.2-1B layer over 8192 tokens: keys, queries, MLP; then the output layer over 2048 targets.
    Product(8192, 2048, 512),
    Product(8192, 2048, 2048),
    Product(8192, 2048, 8192),
    Product(2048, 2048, 128256),
    # Gradients of the MLP's weight and of the output weight.
    Product(8192, 8192, 2048, is_transposed=True),
    Product(128256, 2048, 2048, is_transposed=True),
)


def machine(settings: Settings) -> Result:
    """Versions, compiler, device, bandwidth of copies [GB/s], and bf16 matrix products [TFLOP/s].

    ``matrix_peak_tflops`` is the best of the products: what shares of the peak are shares of.
    """
    found: Result = {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "gcc": shutil.which("gcc"),
        "has_python_headers": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    }
    if settings.is_cuda:
        properties = torch.cuda.get_device_properties(settings.device)
        found["device"] = {
            "name": properties.name,
            "capability": torch.cuda.get_device_capability(settings.device),
            "memory_gb": properties.total_memory / 1e9,
            "num_processors": properties.multi_processor_count,
        }
        if shutil.which("nvidia-smi"):
            found["nvidia_smi"] = subprocess.run(
                ["nvidia-smi"], capture_output=True, text=True, check=False
            ).stdout
    found["copy_gb_per_second"] = _bandwidths(settings)

    products = (Product(64, 64, 64), Product(64, 64, 32, True)) if settings.is_small else _PRODUCTS
    num_timed = 3 if settings.is_small else 30
    found["products_tflops"] = {
        product.name: tflops(product, settings.device, torch.bfloat16, num_timed // 3, num_timed)
        for product in products
    }
    found["matrix_peak_tflops"] = max(found["products_tflops"].values())
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _bandwidths(settings: Settings) -> dict[str, float]:
    num_bytes = 2**16 if settings.is_small else 2**30
    device = settings.device
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(on_device)
    pageable = torch.empty(num_bytes, dtype=torch.uint8)
    ways = {
        "within device, read and written": (other, on_device, 2),
        "pageable to device": (on_device, pageable, 1),
        "device to pageable": (pageable, on_device, 1),
    }
    if settings.is_cuda:
        pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        ways["pinned to device"] = (on_device, pinned, 1)
        ways["device to pinned"] = (pinned, on_device, 1)
    found = {}
    for name, (to, of, times) in ways.items():
        copy = partial(to.copy_, of, non_blocking=True)
        found[name] = times * num_bytes / 1e9 / median_seconds(copy, device, 1, 5)
    return found


def process_group(settings: Settings) -> Result:
    """One rank: NCCL (gloo on a CPU), three groups between CPUs as a recipe has, the mesh, a reduction."""
    with joined_ranks(settings) as ranks:
        for _ in range(3):
            ranks.new_cpu_group()
        means = mean_over_ranks(torch.tensor([1.0, 2.0], device=ranks.device)).tolist()
        shape = list(ranks.mesh.mesh.shape)
        return {
            "backend": torch.distributed.get_backend(),
            "checks": [
                check("mean over one rank", means == [1.0, 2.0], means, [1.0, 2.0]),
                check("mesh of one rank", shape == [1, 1, 1, 1], shape, [1, 1, 1, 1]),
            ],
        }
