"""Stages 8 and 10: update steps of a 1B-shaped model, from eager layers to all that is compiled."""

import importlib.util
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from recipe_utils.benchmark.gpu.crafted import document_lengths, update_step
from recipe_utils.benchmark.gpu.flops import decoder_flops
from recipe_utils.benchmark.gpu.in_process import crafted_config, knows, set_up
from recipe_utils.benchmark.gpu.measure import (
    Result,
    Settings,
    check,
    median_seconds,
    peak_gb,
    restart_peak,
    wait_for,
)
from recipe_utils.data.loader.loader import UpdateStep

_TOKENS_PER_UPDATE_STEP = 16384
_CHUNKS = (1024, 2048, 4096, 8192)

KERNEL_GROUPS = {
    "attention": r"flash|flex|fmha|attention|sdpa",
    "matrix products": r"gemm|gemv|cutlass|nvjet|xmma|cublas|::addmm|::mm|::bmm|::linear",
    "optimizer, gradient norm": r"multi_tensor|adam|foreach",
    "softmax and loss": r"softmax|nll|cross_entropy|logsumexp|gather|scatter",
    "norms": r"norm|rsqrt",
    "copies and casts": r"memcpy|memset|copy|_to\b|::cat|cat_|zero_|fill",
    "compiled (Triton)": r"triton",
    "element by element, sums": r"elementwise|reduce|vectorized|aten::",
}
"""Group -> what its kernels' names have, in small letters; the first that fits."""


def ways() -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Each step on the way to the fastest, with all those before: name, keys of the config or why not."""
    keys: dict[str, Any] = {}
    if knows("packed_attention"):
        keys["packed_attention"] = "flex"
    yield "eager", dict(keys)
    yield "fused norms", dict(keys)
    if knows("packed_attention"):
        keys["packed_attention"] = "varlen"
        yield "varlen", dict(keys)
    else:
        yield "varlen", "no packed_attention in this version"
    keys["compile"] = True
    yield "compiled layers and loss", dict(keys)
    keys |= {"loss.tokens_per_chunk": 4096}
    yield "loss in chunks of 4096: all", dict(keys)


def _row_lengths(settings: Settings) -> list[int]:
    # The first is compiled for its own length, the second for any.
    return [128] if settings.is_small else [8192, 2048, 4096, 16384]


def speed(settings: Settings) -> Result:
    """Update steps of at least 16384 tokens at each length of rows, in each of :func:`ways`.

    Each ends as the recipe's ``update``: clipped, stepped, zeroed. Half of all tokens are targets.
    """
    found: Result = {"rows": [], "chunks": [], "kernels": {}}
    found |= {"checks": [], "not_available": [], "left_out": []}
    last = None
    for name, keys in ways():
        if isinstance(keys, str):
            found["not_available"].append(f"{name}: {keys}")
            continue
        keys = _on_this_device(keys, settings)
        _measure(name, keys, _row_lengths(settings), settings, found)
        last = keys
    if last is not None and not settings.is_small:
        for chunk in _CHUNKS:
            rows = _row_lengths(settings)[:1]
            chunk_keys = {**last, "loss.tokens_per_chunk": chunk}
            _measure(f"chunks of {chunk}", chunk_keys, rows, settings, found, into="chunks")
    return found


def _on_this_device(keys: dict[str, Any], settings: Settings) -> dict[str, Any]:
    if settings.is_cuda:
        return keys
    return {key: value for key, value in keys.items() if key != "packed_attention"}


def _measure(  # a way, where it is to be measured, and what takes the figures
    name: str,
    keys: dict[str, Any],
    row_lengths: list[int],
    settings: Settings,
    found: Result,
    into: str = "rows",
    change: Callable[[Any], None] | None = None,
) -> None:
    """Adds an entry for each length of rows, and what ``eager`` and ``all`` spend on which kernels.

    A way that raises is a check that failed, and the next one is measured.
    """
    if not settings.has_time():
        found["left_out"] += [f"{name}, rows of {slots}" for slots in row_lengths]
        return
    torch._dynamo.reset()
    try:
        with set_up(crafted_config(settings, name, **keys)) as recipe:
            if name == "eager":
                _undo_fused_layers(recipe.model)
            if change is not None:
                change(recipe.model)
            for slots in row_lengths:
                if settings.has_time():
                    found[into].append(
                        {"way": name, "slots": slots, **_of_rows(recipe, slots, settings)}
                    )
                else:
                    found["left_out"].append(f"{name}, rows of {slots}")
            if name == "eager" or name.endswith("all"):
                step, _ = _step(recipe, row_lengths[0], settings)
                found["kernels"][name] = kernel_milliseconds(recipe, step)
    except Exception:
        found["checks"].append(check(name, False, traceback.format_exc(), None))


def _undo_fused_layers(model: nn.Module) -> None:
    """Gives back forwards of torchtune that :mod:`recipe_utils.model.build.kernels` has replaced."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if getattr(forward, "__module__", "") == "recipe_utils.model.build.kernels":
            del module.__dict__["forward"]


def _step(recipe: Any, slots: int, settings: Settings) -> tuple[UpdateStep, list[list[int]]]:
    tokens = 2 * slots if settings.is_small else _TOKENS_PER_UPDATE_STEP
    longest = recipe.tokenizer.max_seq_len
    rows = [document_lengths(slots, longest, seed) for seed in range(max(tokens // slots, 1))]
    vocab_size = recipe.model.tok_embeddings.num_embeddings
    return update_step(rows, vocab_size, settings.is_cuda), rows


def _of_rows(recipe: Any, slots: int, settings: Settings) -> Result:
    step, rows = _step(recipe, slots, settings)
    restart_peak(settings.device)
    num_warm_up, num_timed = (1, 2) if settings.is_small else (3, 10)
    try:
        seconds = median_seconds(
            lambda: recipe.update(step), settings.device, num_warm_up, num_timed
        )
    except torch.OutOfMemoryError:
        recipe.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return {"error": "out of memory"}
    lengths = [length for row in rows for length in row]
    flops = decoder_flops(recipe.model, lengths, step.totals["target_tokens"])
    return {
        "microbatches": len(rows),
        "milliseconds": seconds * 1e3,
        "tokens_per_second": step.totals["real_tokens"] / seconds,
        "tflops": flops.total / seconds / 1e12,
        "share_in_attention": flops.attention / flops.total,
        "peak_gb": peak_gb(settings.device),
    }


def kernel_milliseconds(recipe: Any, step: UpdateStep) -> dict[str, float]:
    """Time of one update step by :data:`KERNEL_GROUPS`; on a CPU of operations, each without those in it."""
    is_cuda = recipe.ranks.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
    with profile(activities=activities) as profiler:
        recipe.update(step)
        wait_for(recipe.ranks.device)
    groups = dict.fromkeys([*KERNEL_GROUPS, "other"], 0.0)
    for event in profiler.key_averages():
        is_kernel = not str(event.device_type).endswith("CPU")
        if is_kernel != is_cuda:
            continue
        microseconds = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        groups[group_of(event.key)] += microseconds / 1e3
    return groups


def group_of(kernel: str) -> str:
    """Of :data:`KERNEL_GROUPS`, or ``other``."""
    name = kernel.lower()
    if name.startswith("triton_"):
        return "compiled (Triton)" if "flex" not in name else "attention"
    return next((group for group, text in KERNEL_GROUPS.items() if re.search(text, name)), "other")


def beyond_bf16(settings: Settings) -> Result:
    """float8 with one scale per tensor in all layers' products, and FlashAttention 3, where they are there."""
    found: Result = {"rows": [], "checks": [], "not_available": [], "left_out": []}
    usable = [(name, keys) for name, keys in ways() if not isinstance(keys, str)]
    _, keys = usable[-1]
    keys = _on_this_device(keys, settings)
    rows = _row_lengths(settings)[:1]
    if not settings.is_cuda or torch.cuda.get_device_capability(settings.device) < (8, 9):
        found["not_available"].append("float8: needs CUDA and compute capability 8.9")
    elif importlib.util.find_spec("torchao.float8") is None:
        found["not_available"].append("float8: this torchao has none")
    else:
        _measure("float8", keys, rows, settings, found, change=_to_float8)

    problem = _problem_of_flash_attention_3(settings)
    if problem is not None:
        found["not_available"].append(f"FlashAttention 3: {problem}")
    else:
        from torch.nn import attention

        attention.activate_flash_attention_impl("FA3")
        _measure("FlashAttention 3", keys, rows, settings, found)
    return found


def _to_float8(model: Any) -> None:
    """Before the first forward, so that compiled layers meet them; weights stay those of the optimizer."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    for layer in model.layers:
        convert_to_float8_training(layer, config=config)


def _problem_of_flash_attention_3(settings: Settings) -> str | None:
    from torch.nn import attention

    if not settings.is_cuda:
        return "needs CUDA"
    if not knows("packed_attention"):
        return "needs packed_attention=varlen, which this version has not"
    if not hasattr(attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} cannot choose it"
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "no module flash_attn_interface"
    return (
        None if inspect.isfunction(attention.activate_flash_attention_impl) else "cannot be chosen"
    )
