"""Stages 3 and 5: attention within documents against each document alone, and what is compiled for it.

Shapes: s slots of a row, d embedding width.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchtune import config, training

from recipe_utils.benchmark.gpu.crafted import RandomWeights, packed_row
from recipe_utils.benchmark.gpu.in_process import joined_ranks, knows
from recipe_utils.benchmark.gpu.measure import (
    Result,
    Settings,
    at_most,
    attempt,
    check,
    peak_gb,
    restart_peak,
    wait_for,
)
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.to_device import to_device_ahead
from recipe_utils.loss import LinearCrossEntropyLoss
from recipe_utils.loss.attach_loss import attach_loss
from recipe_utils.model.attention.document_mask import attend_within_documents
from recipe_utils.model.build.build import ModelSettings, build_model
from recipe_utils.model.build.weights import load_weights
from recipe_utils.parallel.ranks import Ranks

_VOCAB_SIZE = 256
_FP32_ERROR = 1e-5
"""Of outputs and gradients, against float64, in the norm."""


def one_layer(settings: Settings, longest_row: int) -> dict[str, Any]:
    """A decoder of one layer whose keys and values are shared by four query heads."""
    return {
        "_component_": "torchtune.models.llama3_2.llama3_2",
        "vocab_size": _VOCAB_SIZE,
        "num_layers": 1,
        "num_heads": 4 if settings.is_small else 8,
        "num_kv_heads": 1 if settings.is_small else 2,
        "embed_dim": 64 if settings.is_small else 512,
        "intermediate_dim": 64,
        "max_seq_len": longest_row,
        "scale_factor": 1,
    }


def build(model: dict[str, Any], ranks: Ranks, **keys: Any) -> nn.Module:
    """A model as the recipe builds it, with random weights.

    Args:
        model: component.
        ranks: of the job.
        keys: of :class:`recipe_utils.model.build.build.ModelSettings`.
    """

    def prepare(decoder: nn.Module, _: bool) -> None:
        attend_within_documents(decoder, ranks.device, model["max_seq_len"])
        attach_loss(decoder, LinearCrossEntropyLoss())

    settings = ModelSettings(**keys)
    made = build_model(
        partial(config.instantiate, OmegaConf.create(model)), prepare, settings, ranks
    )
    weights = RandomWeights(model, ranks.device.type).load_checkpoint()
    load_weights(made, weights, settings, ranks.device)
    return made


def on_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """The microbatch as the recipe brings it there."""
    pinned = microbatch.pin_memory() if device.type == "cuda" else microbatch
    (copied,) = to_device_ahead([pinned], device)
    return copied


def _ways(settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of ways to attend, and keys that choose them; what this version chooses by itself if it has none."""
    names = {"fp32": ("flex", "by_document"), "bf16": ("varlen", "flex", "by_document")}
    for dtype, ways in names.items():
        if knows("packed_attention") and settings.is_cuda:
            for way in ways:
                yield f"{way} in {dtype}", {"dtype": dtype, "packed_attention": way}
        else:
            yield f"this version's in {dtype}", {"dtype": dtype}


def attention(settings: Settings) -> Result:
    """Forward and gradients of self-attention in packed rows, against each document alone in float64.

    In bf16 the bound is twice the error of scaled_dot_product_attention itself, each document alone.
    """
    lengths = [5, 1, 7, 16] if settings.is_small else [1, 127, 128, 129, 2048, 300]
    row = packed_row(lengths, _VOCAB_SIZE, seed=0, row_multiple=32 if settings.is_small else 2048)
    found: Result = {"errors": {}, "checks": [], "left_out": [], "not_available": []}
    if not (knows("packed_attention") and settings.is_cuda):
        found["not_available"].append("a choice of attention: needs packed_attention, and CUDA")
    with joined_ranks(settings) as ranks:
        for name, keys in _ways(settings):
            if not settings.has_time():
                found["left_out"].append(name)
                continue
            made = attempt(name, partial(_compare, name, keys, row, settings, ranks))
            found["errors"][name] = made.pop("errors", None)
            found["checks"].append(made)
    return found


def _compare(
    name: str, keys: dict[str, Any], row: Microbatch, settings: Settings, ranks: Ranks
) -> Result:
    row = on_device(row, settings.device)
    model_component = one_layer(settings, row.inputs["tokens"].size(1))
    model: Any = build(model_component, ranks, **keys)
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        args[0].retain_grad()
        kept.append((args[0], output))

    layer = model.layers[0].attn
    layer.register_forward_hook(keep)
    model(**row.inputs)
    x, output = kept[0]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(output.shape, generator=generator).to(output)
    output.backward(weight)
    mine = [output.detach(), x.grad, *_gradients(layer)]

    exact = _alone(model_component, layer, x, weight, row, torch.float64)
    errors = _errors(mine, exact)
    bound = _FP32_ERROR
    if keys["dtype"] == "bf16":
        bound = 2 * max(_errors(_alone(model_component, layer, x, weight, row, x.dtype), exact))
    return {"errors": errors, **at_most(name, max(errors), bound)}


def _alone(
    component: dict[str, Any],
    layer: nn.Module,
    x: Tensor,
    weight: Tensor,
    row: Microbatch,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The attention layer of torchtune itself, document by document: output, gradients of x and of all weights."""
    with x.device, training.set_default_dtype(torch.float32):
        decoder: Any = config.instantiate(OmegaConf.create(component))
    own = decoder.layers[0].attn
    own.load_state_dict(layer.state_dict())
    own.to(dtype)
    x = x.detach().to(dtype).requires_grad_()
    lengths = list(row.inputs["document_lengths"][0])
    parts = zip(x.split(lengths, 1), row.inputs["input_pos"].split(lengths, 1), strict=True)
    output = torch.cat([own(part, part, input_pos=positions) for part, positions in parts], dim=1)
    output.backward(weight.to(dtype))
    assert x.grad is not None
    return [output.detach(), x.grad, *_gradients(own)]


def _gradients(layer: nn.Module) -> list[Tensor]:
    return [p.grad for _, p in sorted(layer.named_parameters()) if p.grad is not None]


def _errors(found: list[Any], exact: list[Tensor]) -> list[float]:
    """Of output and gradients, in the norm, relative."""
    pairs = zip(found, exact, strict=True)
    return [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]


def compilations(settings: Settings) -> Result:
    """What is compiled for lengths of rows, in training and validation; and the ninth length."""
    ways: dict[str, dict[str, Any]] = {"layers": {"compile": True}}
    if settings.is_cuda:
        ways["attention"] = {"packed_attention": "flex"} if knows("packed_attention") else {}
    found: Result = {"ways": {}, "checks": [], "left_out": []}
    with joined_ranks(settings) as ranks:
        for name, keys in ways.items():
            made = attempt(name, partial(_compile, name, keys, settings, ranks))
            found["ways"][name] = made.pop("compiled", None)
            found["checks"].append(made)
    return found


def _compile(name: str, keys: dict[str, Any], settings: Settings, ranks: Ranks) -> Result:
    unit, num_lengths = (16, 1) if settings.is_small else (1024, 9)
    component = one_layer(settings, unit * num_lengths)
    torch._dynamo.reset()
    model = build(component, ranks, **keys)
    num_heads = component["num_heads"]
    compiled = []
    # The second time around every length has been met.
    for number in [*range(1, num_lengths + 1), *range(1, num_lengths + 1)]:
        for trains in (True, False):
            if not settings.has_time():
                continue
            row = packed_row([unit // 2 + 1, unit * number - unit // 2 - 1], _VOCAB_SIZE, number)
            row = on_device(row, settings.device)
            model.train(trains)
            restart_peak(settings.device)
            before, start = _num_graphs(), time.perf_counter()
            with torch.set_grad_enabled(trains):
                sums = model(**row.inputs, targets=row.targets)
                if trains:
                    sums[0].backward()
            wait_for(settings.device)
            compiled.append(
                {
                    "slots": unit * number,
                    "trains": trains,
                    "new_graphs": _num_graphs() - before,
                    "seconds": time.perf_counter() - start,
                    "peak_gb": peak_gb(settings.device),
                    # What attention takes that has fallen back to uncompiled flex attention, once.
                    "gb_of_all_scores": num_heads * (unit * number) ** 2 * 4 / 1e9,
                }
            )
    known = compiled[2 * num_lengths :]
    again = sum(each["new_graphs"] for each in known)
    slow = [e for e in known if settings.is_cuda and e["peak_gb"] > e["gb_of_all_scores"] > 0.5]
    passed = bool(known) and again == 0 and not slow
    text = f"{name}: no graphs for known lengths, no scores of all pairs"
    return {"compiled": compiled, **check(text, passed, again + len(slow), 0)}


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
