"""A model with the way in which the microbatches of an update step run through it: whole on each rank, or in stages.

Example: a decoder of 4 layers, 3 microbatches. A :class:`Whole` model computes them one after the other, and FSDP2 gathers
its shards. As a :class:`.Pipeline` of two stages, rank 0 has layers 0 and 1, rank 1 has layers 2 and 3, and one schedule
runs all three. A recipe holds one of the two as ``self.model``. Who only needs forwards, norms or names does not ask which.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from recipe_utils.losses.attach import attach_loss, check_sums
from recipe_utils.models.attention.document_mask import attend_within_documents
from recipe_utils.models.attention.exchange import RowGroups, row_groups
from recipe_utils.models.construct import build_stages
from recipe_utils.models.distribute import parallelize
from recipe_utils.models.pipeline.microbatches import Pipeline
from recipe_utils.models.pipeline.schedule import PipelineSettings
from recipe_utils.models.pipeline.stages import Stages, has_output, local_stages
from recipe_utils.models.settings import ModelSettings
from recipe_utils.optim.grad_norm import ModelWithGradients
from recipe_utils.optim.optimizer import trained_parameters, unwrapped
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.parallel.to_device import to_device_ahead
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.text.limits import ModelLimits, PackedAttention
from recipe_utils.update_steps.step import Microbatch


class Rows(NamedTuple):
    """Rows that a model computes."""

    attention: PackedAttention
    """How it computes packed ones."""
    longest: int
    """Most tokens of a row."""
    groups: RowGroups = MappingProxyType({})
    """Ranks that compute a row together."""


class Runner(ModelWithGradients, Protocol):
    """What a :class:`Whole` model and a :class:`.Pipeline` have in common."""

    device: torch.device
    num_sums: int
    """Number k of the sums that its loss module returns."""
    fingerprints: Mapping[str, str]
    """Those of its frozen weights, which a resumed training must have, too."""

    def forward(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Returns sums [k] in fp64 over microbatches on the CPU, without gradients; their mean over the pipeline counts."""

    def outputs(self, microbatches: Sequence[Microbatch]) -> dict[int, Any]:
        """Returns the loss module's outputs by index, without gradients; empty on ranks without the last stage."""


def rows_of(limits: ModelLimits, longest: int, ranks: Ranks, max_ranks_per_row: int = 1) -> Rows:
    """Returns the rows of a trained model with these ``limits``. Collective; call it once."""
    return Rows(limits.attentions[0], longest, row_groups(ranks, max_ranks_per_row))


@dataclass(eq=False)
class Whole:
    """Model with all layers on this rank, or its shards of them; a :class:`Runner`."""

    module: nn.Module
    device: torch.device
    num_sums: int = 1
    settings: ModelSettings = field(default_factory=ModelSettings)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    is_cut = False
    tied_copies = frozenset[int]()

    def __post_init__(self) -> None:
        self._offloading = self.settings.offloading(self.module)

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Returns the loss module's sums over the microbatch's targets, [k].

        :func:`.attach_loss` makes the loss a part of the model, where FSDP2 gathers the output weight. Raises ConfigError
        for another number of sums.
        """
        with self._offloading, record_function("forward"):
            sums: Tensor = self.module(**microbatch.inputs, targets=microbatch.targets)
        check_sums(sums, self.num_sums)
        return sums

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """See :meth:`Runner.forward`."""
        totals = torch.zeros(self.num_sums, dtype=torch.float64, device=self.device)
        for microbatch in to_device_ahead(microbatches, self.device):
            totals += self.sums(microbatch)
        return totals

    @torch.no_grad()
    def outputs(self, microbatches: Sequence[Microbatch]) -> dict[int, Any]:
        """See :meth:`Runner.outputs`."""
        ahead = enumerate(to_device_ahead(microbatches, self.device))
        return {index: self.module(**each.inputs, targets=each.targets) for index, each in ahead}

    @property
    def trained_names(self) -> list[str]:
        """Names of the trained parameters."""
        return [*map(unwrapped, trained_parameters(self.module))]

    def norms_over_stages(self, norms: Tensor) -> Tensor:
        """Returns ``norms``."""
        return norms


def build_modules(
    meta_model: nn.Module,
    loss_of: Callable[[Any], Any],
    settings: ModelSettings,
    pipeline: PipelineSettings,
    ranks: Ranks,
    rows: Rows | None = None,
) -> nn.Module:
    """Returns a copy of a model, or this rank's stages of it, that ends in a loss module. It is on the meta device.

    ``loss_of`` maps the stage with the output layer to its loss module. Without ``rows`` attention is as it was. Raises
    ValueError or ConfigError if the model cannot be built as configured.
    """
    model = build_stages(meta_model, pipeline, ranks)
    problem = ""
    # Each stage is changed, then parallelized: wrappers and shards come last.
    for stage in local_stages(model):
        if rows is not None:
            attend_within_documents(stage, *rows)
        if has_output(stage):
            loss_fn = loss_of(stage)
            if pipeline.splits_backward and not getattr(loss_fn, "splits_backward", True):
                problem = f"{type(loss_fn).__name__} has no backward in two parts; set it to 1F1B or Interleaved1F1B"
            attach_loss(stage, loss_fn, pipeline.splits_backward, settings.compile)
        parallelize(stage, settings, ranks)
    # On all ranks, of which one has the loss.
    if pipeline.splits_backward and (text := max(gather_objects(problem, ranks.cpu_group))):
        raise ConfigError(Problem("pipeline_parallel_schedule", text, pipeline.pipeline_parallel_schedule))
    return model


def build_runner(
    module: nn.Module,
    settings: ModelSettings,
    pipeline: PipelineSettings,
    ranks: Ranks,
    num_sums: int = 1,
    fingerprints: Mapping[str, str] = MappingProxyType({}),
) -> Whole | Pipeline:
    """Returns the runner of a model of :func:`build_modules` that has its weights. All ranks together.

    ``num_sums`` is the number of the loss module's sums, ``fingerprints`` are those of frozen weights.
    """
    if not isinstance(module, Stages):
        return Whole(module, ranks.device, num_sums, settings, fingerprints)
    assert ranks.pp_group is not None
    return Pipeline(
        module,
        num_stages=module.num_stages,
        schedule=pipeline.pipeline_parallel_schedule,
        embed_dim=module.embed_dim,
        dtype=settings.torch_dtype,  # of hidden states
        device=ranks.device,
        group=ranks.pp_group,
        output_is_tied=module.output_is_tied,
        num_sums=num_sums,
        fingerprints=fingerprints,
    )
