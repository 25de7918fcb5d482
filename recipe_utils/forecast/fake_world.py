"""What a recipe gets in place of weights, data, memory and other ranks: all in :func:`fake_world`."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune import training
from torchtune.models.llama3_1 import Llama3ScaledRoPE

from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.model.build import weights
from recipe_utils.model.frozen import outputs
from recipe_utils.model.vision import vision_transformer
from recipe_utils.optim.nonfinite import NonfiniteGuard
from recipe_utils.parallel import process_group
from recipe_utils.prove import RandomWeights


class FakeWeights(RandomWeights):
    """Checkpointer of a ``model``'s component with weights that have shapes and no numbers."""

    def draw(self, name: str, shape: torch.Size) -> Tensor:
        """Returns a weight without numbers."""
        return torch.empty(shape, dtype=torch.bfloat16)


class FakeDataset:
    """Map-style dataset of samples that are all targets: texts, pairs or images."""

    def __init__(self, tokenizer: Any = None, kind: str = "text", length: int = 64) -> None:
        self.kind, self.length = kind, length

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a sample of ``length`` tokens; a pair of two, which share the first half; or an image."""
        tokens = np.arange(self.length) % 7
        if self.kind == "image":
            return {"image": np.zeros((256, 256, 3), dtype=np.uint8), "label": 0}
        if self.kind == "text":
            return {"tokens": tokens, "labels": tokens}
        labels = np.where(np.arange(self.length) < self.length // 2, -100, tokens)
        other = np.where(labels < 0, tokens, tokens + 1)
        pair = {"chosen_input_ids": tokens, "rejected_input_ids": other}
        return pair | {"chosen_labels": labels, "rejected_labels": np.maximum(labels, other)}


@contextmanager
def fake_world(num_ranks: int, live: LiveBytes) -> Iterator[FakeTensorMode]:
    """Makes this process rank 0 of ``num_ranks`` with fake weights, whose bytes ``live`` counts.

    Setup runs on real tensors but for weights. Recipes must be imported in it. Yields the mode of ``update``.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with fake, live:
                return function(*args, **kwargs)

        return call

    def on_real(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return call

    def rope_init(self: Any) -> None:  # its scaling reads its table
        on_real(real_rope_init)(self)
        for name, table in list(self.named_buffers(recurse=False)):
            self.register_buffer(name, torch.empty_like(table), persistent=False)

    def empty_weights(whole: nn.Module, _: int) -> dict[str, Tensor]:
        return {name: torch.empty(p.shape) for name, p in whole.named_parameters()}

    def gather(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine] * len(found)

    real_rope_init = Llama3ScaledRoPE.rope_init
    shape = "compute_local_shape_and_global_offset"  # has a table of ranks
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (FakeWeights, "draw", counted(FakeWeights.draw)),
        (weights, "_load", counted(weights._load)),
        (weights, "initial_adapters", counted(weights.initial_adapters)),
        (weights, shape, on_real(getattr(weights, shape))),
        (weights, "fingerprint_of_frozen", lambda *_: {}),
        (outputs, "crc32_of_weights", lambda *_: ""),
        (vision_transformer, "fresh_vit_weights", counted(empty_weights)),
        (Llama3ScaledRoPE, "rope_init", rope_init),
        (training, "validate_no_params_on_meta_device", lambda _: None),
        (NonfiniteGuard, "should_step", lambda *_: True),
        (outputs.FrozenOutputs, "checks_outputs", False),
        (dist, "all_gather_object", gather),
        (process_group, "new_cpu_group", lambda *_: dist.group.WORLD),
    )
    sizes = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {k: str(v) for k, v in sizes.items()}))
        for owner, name, instead in replaced:
            stack.enter_context(mock.patch.object(owner, name, instead))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        stack.callback(dist.destroy_process_group)
        yield fake
