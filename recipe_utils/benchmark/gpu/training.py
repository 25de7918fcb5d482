"""Stages 2, 4, 7 and 9: the recipe trains as on a CPU, without waits; checkpoints; whether weights move."""

import math
import shutil
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from recipe_utils.benchmark.gpu.crafted import document_lengths, update_step
from recipe_utils.benchmark.gpu.in_process import (
    crafted_config,
    embedded_config,
    knows,
    set_up,
    train,
)
from recipe_utils.benchmark.gpu.measure import (
    Result,
    Settings,
    at_most,
    attempt,
    check,
    host_waits,
    median_seconds,
    wait_for,
)
from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.checkpoint.save import CheckpointWriter
from recipe_utils.optim.optimizer import trained_parameters

_FP32_ERROR = 1e-4
"""Of losses in fp32, relative: kernels sum in other orders, and AdamW enlarges that from step to step."""
_BF16_ERROR = 0.02


def as_on_a_cpu(settings: Settings) -> Result:
    """The recipe with the embedded config: losses in every way of training, against a CPU's in fp32."""
    num_steps = 3 if settings.is_small else 10
    config = partial(
        embedded_config, settings, max_steps_per_epoch=num_steps, run_val_every_n_steps=num_steps
    )
    by_name: dict[str, list[float]] = {}

    def run(name: str, cfg: DictConfig) -> list[float]:
        logged = train(cfg)
        by_name[name] = logged["loss"] + logged.get("val_loss", [])
        return by_name[name]

    def compare(name: str, bound: float, reference: str = "cpu", **changes: Any) -> Result:
        found = run(name, config(name, **changes))
        return at_most(f"{name}: losses", _distance(found, by_name[reference]), bound)

    one_microbatch = {
        "microbatching": "in_order",
        "gradient_accumulation_steps": 1,
        "clip_grad_norm": None,
    }
    trace = config("profiler").output_dir + "/profiling_outputs"
    ways: dict[str, dict[str, Any]] = {
        "packed": {"microbatching": "packed"},
        "least_padding": {"microbatching": "least_padding"},
        "bf16": {"dtype": "bf16", "bound": _BF16_ERROR},
        "activation checkpointing": {"enable_activation_checkpointing": True},
        "profiler": {
            "profiler__enabled": True,
            "profiler__profile_memory": True,
            "profiler__cuda": settings.is_cuda,
            "profiler__wait_steps": 0,
        },
        "one microbatch": {**one_microbatch, "bound": math.inf},
        "optimizer_in_bwd": {
            **one_microbatch,
            "optimizer_in_bwd": True,
            "reference": "one microbatch",
        },
    }
    if settings.is_cuda:
        ways["in_order"] = {"microbatching": "in_order"}  # on a CPU what all are compared with
        ways["activation offloading"] = {
            "enable_activation_checkpointing": True,
            "enable_activation_offloading": True,
        }
    run("cpu", config("cpu", device="cpu", microbatching="in_order"))
    checks, left_out = [], []
    for name, changes in ways.items():
        if settings.has_time():
            checks.append(
                attempt(name, partial(compare, name, **{"bound": _FP32_ERROR, **changes}))
            )
        else:
            left_out.append(name)
    if "profiler" in by_name:
        traces = [path.name for path in Path(trace).rglob("*") if path.is_file()]
        checks.append(check("profiler: files", bool(traces), traces, "at least one"))
    found: Result = {"losses": by_name, "checks": checks, "left_out": left_out}
    if not settings.is_cuda:
        found["not_available"] = ["activation offloading needs CUDA"]
    return found


def _distance(found: list[float], expected: list[float]) -> float:
    """Largest relative error; infinite where one has more or one is NaN."""
    if len(found) != len(expected):
        return math.inf
    errors = [abs(a / b - 1) for a, b in zip(found, expected, strict=True)]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def waits(settings: Settings) -> Result:
    """Host waits in ``update`` once it is warm: first as errors, then the list of all of them."""
    found: Result = {"raised_as_error": None, "waits_per_update": None, "where": None, "checks": []}
    with (
        set_up(embedded_config(settings, "waits", dtype="bf16")) as recipe,
        recipe.loader.epoch(0) as steps,
    ):
        update_steps = iter(steps)
        for step in islice(update_steps, 3):
            recipe.update(step)
        wait_for(settings.device)
        step = next(update_steps)
        if settings.is_cuda:
            torch.cuda.set_sync_debug_mode("error")
            try:
                recipe.update(step)
            except RuntimeError as error:
                found["raised_as_error"] = str(error)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            recipe.optimizer.zero_grad(set_to_none=True)
        with host_waits(settings.device) as where:
            recipe.update(next(update_steps))
        if where is not None:
            found["waits_per_update"], found["where"] = len(where), sorted(set(where))
            found["checks"].append(at_most("host waits in update()", len(where), 0))
    return found


def checkpoints(settings: Settings) -> Result:
    """Seconds that saving a 1B-shaped model blocks the training, and whether resuming is bitwise."""
    found: Result = {"blocked_seconds": {}, "not_available": [], "checks": []}
    found["checks"].append(attempt("resume", partial(_resume, settings, "fp32", {})))
    if settings.is_cuda:  # where FlashAttention's backward may add in any order, so no check
        found["resume_in_bf16"] = attempt("", partial(_resume, settings, "bf16", {"dtype": "bf16"}))
    with set_up(crafted_config(settings, "blocked")) as recipe:
        vocab_size = recipe.tokenizer.max_seq_len  # tokens below it are in any vocabulary here
        row = document_lengths(recipe.tokenizer.max_seq_len, recipe.tokenizer.max_seq_len, seed=0)
        recipe.update(update_step([row], vocab_size, settings.is_cuda))
        parameters = trained_parameters(recipe.model).values()
        num_bytes = 3 * sum(
            parameter.nbytes for parameter in parameters
        )  # with AdamW's two moments
        found["gb"] = num_bytes / 1e9
        if shutil.disk_usage(settings.scratch).free < 2.5 * num_bytes:
            found["not_available"].append(f"blocked seconds: no room for {num_bytes / 1e9:.1f} GB")
            return found
        for is_async, names in ((False, ["sync"]), (True, ["async, first", "async, second"])):
            folder = settings.scratch / "checkpoints"
            writer = CheckpointWriter(folder, keep_last_n=1, asynchronous=is_async)
            for number, name in enumerate(names):
                if not settings.has_time(found["blocked_seconds"].get("sync", 0.0)):
                    found.setdefault("left_out", []).append(name)
                    continue
                writer.wait()  # what an earlier save still writes is not this one's time
                wait_for(settings.device)
                state = TrainingState("benchmark", number, epoch=0, samples_consumed=0, seed=0)
                start = time.perf_counter()
                outcome = writer.save(recipe.model, recipe.optimizer, state)
                found["blocked_seconds"][name] = time.perf_counter() - start
                if outcome is not None and outcome.error:
                    raise OSError(outcome.error)
            writer.close()
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _resume(settings: Settings, name: str, changes: dict[str, Any]) -> Result:
    """Trains from a checkpoint in the middle, and compares the losses that follow bitwise."""
    half = 2 if settings.is_small else 5
    keys = {"max_steps_per_epoch": 2 * half, "save_every_n_steps": half, **changes}
    keys["keep_last_n_checkpoints"] = None
    whole = embedded_config(settings, f"whole {name}", **keys)
    resumed = embedded_config(settings, f"resumed {name}", resume_from_checkpoint=True, **keys)
    losses = train(whole)["loss"][half:]
    middle = f"step_{half}"
    shutil.copytree(Path(whole.output_dir, middle), Path(resumed.output_dir, middle))
    found = train(resumed)["loss"]
    return check(f"resume in {name}: losses bitwise", found == losses, found, losses)


def weights_moved(settings: Settings) -> Result:
    """Update steps at a learning rate of fine-tuning: which weights move, and as far as those of fp32 do?"""
    num_steps = 4 if settings.is_small else 100
    ways: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"dtype": "bf16", "optimizer__betas": [0.9, 0.999]},
        "bf16, betas [0.9, 0.95]": {"dtype": "bf16"},
    }
    found: Result = {"num_steps": num_steps, "ways": {}, "not_available": [], "left_out": []}
    if knows("weights_dtype"):
        ways["bf16 with fp32 weights"] = {"dtype": "bf16", "weights_dtype": "fp32"}
    else:
        found["not_available"].append("weights_dtype: no such key in this version")
    moves: dict[str, Tensor] = {}
    for name, changes in ways.items():
        if not settings.has_time():
            found["left_out"].append(name)
            continue
        keys: dict[str, Any] = {"optimizer__lr": 2e-5, "lr_scheduler": None, **changes}
        cfg = embedded_config(settings, name, **keys)
        with set_up(cfg) as recipe, recipe.loader.epoch(0) as steps:
            before = _weights(recipe.model)
            for step in islice(steps, num_steps):
                loss, _ = recipe.update(step)
            moves[name] = _weights(recipe.model) - before
            of_fp32 = moves["fp32"]
            found["ways"][name] = {
                "share_moved": (moves[name] != 0).double().mean().item(),
                "length_over_fp32": (moves[name].norm() / of_fp32.norm()).item(),
                "cosine_with_fp32": torch.cosine_similarity(moves[name], of_fp32, dim=0).item(),
                "last_loss": loss.item(),
                "optimizer_seconds": _optimizer_seconds(recipe, settings),
            }
    wide = found["ways"].get("bf16 with fp32 weights")
    if wide is not None:
        moved = wide["share_moved"], found["ways"]["fp32"]["share_moved"]
        close = moved[0] >= 0.9 * moved[1]
        found["checks"] = [check("fp32 weights move with bf16", close, moved[0], moved[1])]
    return found


def _weights(model: torch.nn.Module) -> Tensor:
    """All matrices but embeddings, whose rows move only with their token; fp32, on the CPU."""
    parts = []
    for name, parameter in trained_parameters(model).items():
        if parameter.dim() > 1 and "tok_embeddings" not in name:
            local: Any = parameter.detach()
            parts.append((local.to_local() if hasattr(local, "to_local") else local).flatten())
    return torch.cat([part.float().cpu() for part in parts])


def _optimizer_seconds(recipe: Any, settings: Settings) -> float:
    for parameter in trained_parameters(recipe.model).values():
        parameter.grad = torch.zeros_like(parameter)
    return median_seconds(recipe.optimizer.step, settings.device, 2, 5)
