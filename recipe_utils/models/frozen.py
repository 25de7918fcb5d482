"""Forward passes of a frozen model, without gradients, in any layout.

Shapes: n target tokens of a microbatch, d model width, v vocabulary size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtune import training
from torchtune.modules.peft import disable_adapter

from recipe_utils.long_rows.exchange import RowGroups
from recipe_utils.losses.attach import attach_loss
from recipe_utils.model_kinds import text_decoder
from recipe_utils.models.adapters.adapted_linear import forget_norms
from recipe_utils.models.attention.document_mask import attend_within_documents
from recipe_utils.models.construct import build_stages
from recipe_utils.models.parallelize import parallelize
from recipe_utils.models.pipeline.microbatches import Pipeline, build_pipeline
from recipe_utils.models.pipeline.schedule import PipelineSettings
from recipe_utils.models.pipeline.stages import has_output, local_stages
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.weights import check_weights, crc32_of_weights, fingerprint_of_config, load_weights
from recipe_utils.optim.optimizer import trained_parameters
from recipe_utils.parallel.fsdp import local, reshard
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.parallel.to_device import to_device_ahead
from recipe_utils.settings.problems import naming
from recipe_utils.update_steps.step import Microbatch


class FrozenModel:
    """Model that runs without gradients and returns its loss module's outputs. All ranks together.

    ``pipeline`` is that of its stages; ``during_forward`` is the context of every forward.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline | None,
        device: torch.device,
        during_forward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._model = model
        self._pipeline = pipeline
        self._device = device
        self._during_forward = during_forward
        # None where the last stage is on another rank.
        self._with_output: Any = next(filter(has_output, local_stages(model)), None)

    @torch.no_grad()
    def outputs(self, microbatches: Sequence[Microbatch]) -> dict[int, Any]:
        """Returns the loss module's outputs by index; empty on ranks without the last stage.

        Microbatches are on the CPU, equally many on all ranks.
        """
        plain = [replace(m, targets=m.targets._replace(outputs={})) for m in microbatches]
        with self._during_forward():
            if self._pipeline is not None:
                return self._pipeline.outputs(plain)
            return {
                index: self._model(**microbatch.inputs, targets=microbatch.targets)
                for index, microbatch in enumerate(to_device_ahead(plain, self._device))
            }

    @contextmanager
    def output_layer(self) -> Iterator[Any]:
        """Yields the output layer, gathered until the end of the block; None on ranks without the last stage."""
        if self._with_output is None:
            yield None
            return
        output = text_decoder(self._with_output).output
        # PyTorch's schedules reshard stages at their end, a forward reshards the root.
        holders = [module for module in (self._with_output, output) if isinstance(module, FSDPModule)]
        for holder in holders:
            holder.unshard()
            # Sharded as a separate unit, the output layer would free its weight after every chunk.
            holder.set_reshard_after_forward(False, recurse=False)
        try:
            yield output
        finally:
            reshard(self._with_output)


def build_frozen_model(
    meta_model: nn.Module,
    loss_fn: Any,
    checkpoint: dict[str, Any],
    modules: ModelSettings,
    ranks: Ranks,
    *,
    longest_row: int,
    row_groups: RowGroups = MappingProxyType({}),
    split_points: list[int] | None = None,
    is_offloaded: bool = False,
    keys: tuple[str, str],
) -> FrozenModel:
    """Builds a copy of a model with its weights for forward passes only, which return what ``loss_fn`` does.

    With ``pp`` ranks it has one stage per rank, cut at ``split_points`` or balanced by its own
    costs; outputs are on the rank of the last stage. Rows have at most ``longest_row`` tokens and may span
    ``row_groups``. ``checkpoint`` contains full weights by torchtune's keys; ``keys`` are the config keys of the
    model and its checkpointer, for ConfigErrors. With ``is_offloaded`` weights are on the device only during forwards.
    """
    # Without a backward there is nothing to interleave.
    pipeline = PipelineSettings(pipeline_parallel_schedule="GPipe", pipeline_parallel_split_points=split_points)
    # As the trained model in a recipe's setup: changed, then parallelized.
    with naming(keys[0]):
        model = build_stages(meta_model, pipeline, ranks)
        for stage in local_stages(model):
            attend_within_documents(stage, ranks.device, longest_row, row_groups)
            if has_output(stage):
                attach_loss(stage, loss_fn)
            parallelize(stage, modules, ranks)
    with naming(keys[1]):
        load_weights(model, checkpoint, modules, ranks.device)
    model.requires_grad_(False).eval()

    @contextmanager
    def on_device() -> Iterator[None]:
        try:
            model.to(ranks.device)
            yield
        finally:
            model.cpu()

    return FrozenModel(
        model,
        build_pipeline(model, pipeline, modules.torch_dtype, ranks),
        ranks.device,
        on_device if is_offloaded else nullcontext,
    )


@contextmanager
def _exchanged(model: nn.Module, values: Sequence[Tensor]) -> Iterator[None]:
    """Exchanges trained parameters, of which each has this rank's shard in ``values``, until the end of the block."""

    def exchange() -> None:
        reshard(model)  # FSDP2's root keeps gathered parameters
        for parameter, value in zip(trained_parameters(model).values(), values, strict=True):
            shard = local(parameter.detach())
            before = shard.clone()
            shard.copy_(value)
            value.copy_(before)
        forget_norms(model)

    exchange()
    try:
        yield
    finally:
        exchange()


def policy_at_start(
    policy: nn.Module, pipeline: Pipeline | None, device: torch.device, adapters: Sequence[Tensor]
) -> FrozenModel:
    """Returns the trained model with the adapters that it started with; if empty, without adapters."""

    @contextmanager
    def at_start() -> Iterator[None]:
        was_training = policy.training
        policy.eval()
        try:
            with _exchanged(policy, adapters) if adapters else disable_adapter(policy):
                yield
        finally:
            policy.train(was_training)

    return FrozenModel(policy, pipeline, device, at_start)


def load_frozen(
    checkpointer: Any, key: str, meta_model: nn.Module | None, ranks: Ranks
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a checkpoint, and fingerprints that a resumed training must have, too.

    ``key`` is the checkpointer's. Raises ConfigError if its weights do not fit ``meta_model``, unless None.
    """
    with naming(key):
        checkpoint = checkpointer.load_checkpoint()
        weights = checkpoint[training.MODEL_KEY]
        fingerprints = {key: crc32_of_weights(weights, ranks.cpu_group)}
        if meta_model is not None:
            check_weights(meta_model, weights)
            folder = getattr(checkpointer, "_checkpoint_dir", None)
            for name, text in fingerprint_of_config(meta_model, folder).items():
                fingerprints[f"{key}.{name}"] = text
    return checkpoint, fingerprints
