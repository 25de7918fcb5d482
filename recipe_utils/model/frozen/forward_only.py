"""A model that goes forward over all microbatches of an update step and keeps what its head returns."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.to_device import to_device_ahead
from recipe_utils.model.pipeline.pipeline import Pipeline
from recipe_utils.model.pipeline.stages import Stages


class ForwardOnly:
    """Says something of microbatches, without gradients. All ranks together.

    Args:
        model: whole, sharded or the stages of this rank; its head may return anything.
        pipeline: of its stages; None for a model in one piece.
        device: of the microbatches' copies.
    """

    def __init__(self, model: nn.Module, pipeline: Pipeline | None, device: torch.device) -> None:
        self._model = model
        self._pipeline = pipeline
        self._device = device
        self._with_output: Any = model  # None where the last stage is on another rank
        if isinstance(model, Stages):
            self._with_output = model.by_index().get(model.whole.num_stages - 1)

    @torch.no_grad()
    def outputs(self, microbatches: Sequence[Microbatch]) -> dict[int, Any]:
        """What the head returns by the microbatch's index; empty on ranks without the last stage.

        Args:
            microbatches: on the CPU; as many on all ranks.
        """
        if self._pipeline is not None:
            return self._pipeline.outputs(microbatches)
        return {
            index: self._model(**microbatch.inputs, targets=microbatch.targets)
            for index, microbatch in enumerate(to_device_ahead(microbatches, self._device))
        }

    @contextmanager
    def output_layer(self) -> Iterator[Any]:
        """Its output layer, with weights that can be read until the end of the block.

        None on ranks without the last stage.
        """
        if self._with_output is None:
            yield None
            return
        output = getattr(self._with_output, "decoder", self._with_output).output
        # PyTorch's schedules reshard stages at their end, a forward the root.
        holders = [each for each in (self._with_output, output) if isinstance(each, FSDPModule)]
        for holder in holders:
            holder.unshard()
            # As a unit of its own the output layer would let go of its weight after every chunk.
            holder.set_reshard_after_forward(False, recurse=False)
        try:
            yield output
        finally:
            for holder in holders:
                holder.reshard()
