"""Replacements for weights, data and other ranks: a recipe runs on fake tensors."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune.models.llama3_1 import Llama3ScaledRoPE

from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.model.construct import weights
from recipe_utils.model.frozen import model as frozen_model
from recipe_utils.model.vision import vision_transformer
from recipe_utils.optim import adamw_8bit
from recipe_utils.optim.nonfinite import NonfiniteGuard
from recipe_utils.parallel import process_group
from recipe_utils.prove import RandomWeights


class FakeWeights(RandomWeights):
    """Checkpointer of weights without numbers."""

    def draw(self, name: str, shape: torch.Size) -> Tensor:
        """Returns a weight."""
        return torch.empty(shape, dtype=torch.bfloat16)


def compiled_update(
    found_inf: Any,
    numbers: Any,
    tables: Any,
    p: Tensor,
    grad: Tensor,
    step: Tensor,
    *moments: Tensor,
) -> None:
    """Takes the memory of AdamW8bit's compiled update: both moments in fp32, and codes."""
    if len(moments) == 4:  # in codes
        buffers = [torch.empty(p.shape, dtype=torch.float32) for _ in range(2)]
        buffers.append(torch.empty_like(moments[0]))


class FakeDataset:
    """Map-style dataset of ``kind`` text, pair or image; targets are all tokens, of pairs those not shared."""

    def __init__(self, tokenizer: Any = None, kind: str = "text") -> None:
        self.kind, self.length = kind, 64

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a sample of ``length`` tokens, a pair of two that share the first half, or an image."""
        if self.kind == "image":
            return {"image": np.zeros((256, 256, 3), dtype=np.uint8), "label": 0}
        tokens = np.arange(self.length) % 7
        if self.kind == "text":
            return {"tokens": tokens, "labels": tokens}
        is_target = np.arange(self.length) >= self.length // 2
        sides = {"chosen": tokens, "rejected": tokens + is_target}
        ids = {f"{side}_input_ids": each for side, each in sides.items()}
        return ids | {f"{k}_labels": np.where(is_target, v, -100) for k, v in sides.items()}


@contextmanager
def fake_world(num_ranks: int, live: LiveBytes, on_cuda: bool = False) -> Iterator[FakeTensorMode]:
    """Makes this process rank 0 of ``num_ranks``, with weights whose bytes ``live`` counts.

    With ``on_cuda``, AdamW8bit's update takes the memory of a compiled one. Only functions that make
    weights run on fake tensors. Yields their mode, for ``update``. Recipes must be imported within
    this context.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with fake, live:
            return function(*args, **kwargs)

    def on_real(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    def rope_init(self: Any, init: Any = Llama3ScaledRoPE.rope_init) -> None:
        on_real(init, self)  # its scaling reads its table
        for name, table in list(self.named_buffers(recurse=False)):
            self.register_buffer(name, torch.empty_like(table), persistent=False)

    def vit_weights(whole: nn.Module, _: int) -> dict[str, Tensor]:
        return {name: torch.empty(p.shape) for name, p in whole.named_parameters()}

    def gather(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine] * len(found)

    def draw(self: Any, *args: Any, draw: Any = FakeWeights.draw) -> Tensor:
        return counted(draw, self, *args)

    instead: list[tuple[Any, str, Any]] = [
        (FakeWeights, "draw", draw),
        (vision_transformer, "fresh_vit_weights", partial(counted, vit_weights)),
        (Llama3ScaledRoPE, "rope_init", rope_init),
        (weights, "fingerprint_of_frozen", lambda *_: {}),
        (frozen_model, "crc32_of_weights", lambda *_: ""),
        (NonfiniteGuard, "should_step", lambda *_: True),
        (frozen_model.FrozenModel, "checks_outputs", False),
        (dist, "all_gather_object", gather),
        (process_group, "new_cpu_group", lambda *_: dist.group.WORLD),
    ]
    if on_cuda:
        instead.append((adamw_8bit, "_update", compiled_update))
    ways = {"_load": counted, "initial_adapters": counted}
    ways["compute_local_shape_and_global_offset"] = on_real  # it reads a table of ranks
    instead += [(weights, n, partial(way, getattr(weights, n))) for n, way in ways.items()]
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {k: str(v) for k, v in names.items()}))
        for each in instead:
            stack.enter_context(mock.patch.object(*each))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        stack.callback(dist.destroy_process_group)
        yield fake
