"""Pipeline schedules: settings, number of stages and of microbatches.

Example: on 2 ranks ``1F1B`` has stages 0 and 1, and runs any number of microbatches from 2. ``Interleaved1F1B`` has
stages 0 and 2 on rank 0, 1 and 3 on rank 1, and runs 5 microbatches as 6 (one dummy), since its rounds are equal.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.torch_version import TorchVersion

from recipe_utils.parallel.ranks import Ranks
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.settings.keys import STRICT, OnlyWith
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.torchtune_names import logger
from recipe_utils.update_steps.settings import DataSettings

SCHEDULES: dict[str, Any] = {
    "1F1B": Schedule1F1B,
    "GPipe": ScheduleGPipe,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
}


@dataclass(frozen=True, config=STRICT)
class PipelineSettings:
    """Pipeline schedule, and the layers of each stage."""

    pipeline_parallel_schedule: Annotated[
        Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"], OnlyWith("pipeline_parallel_dim", above=1)
    ] = "1F1B"
    """PyTorch's schedule of that name, run once per update step."""
    pipeline_parallel_split_points: Annotated[
        list[Annotated[int, Field(ge=1)]] | None, OnlyWith("pipeline_parallel_dim", above=1)
    ] = None
    """First layer of each stage but the first; null balances parameters."""

    @property
    def splits_backward(self) -> bool:
        """True if the schedule computes gradients of inputs and of weights separately."""
        return "ZeroBubble" in self.pipeline_parallel_schedule

    def num_stages(self, num_ranks: int) -> int:
        """Returns the number of stages: without split points one per rank, interleaved two.

        Raises ConfigError if the split points do not fit the ranks and the schedule.
        """
        schedule = self.pipeline_parallel_schedule
        split_points = self.pipeline_parallel_split_points
        several = has_several_stages_per_rank(schedule)
        if split_points is None:
            return num_ranks * (2 if several else 1)
        num_stages = len(split_points) + 1
        per_rank, rest = divmod(num_stages, num_ranks)
        if rest or (per_rank < 2 if several else per_rank != 1):
            wanted = "two or more" if several else "one"
            text = (
                f"they make {num_stages} stages, but pipeline_parallel_schedule={schedule} needs {wanted} on each "
                f"of {num_ranks} ranks; give {num_ranks * (2 if several else 1) - 1} points"
            )
            raise ConfigError(Problem("pipeline_parallel_split_points", text, split_points))
        return num_stages


def num_to_run(pipeline: PipelineSettings, ranks: Ranks) -> Callable[[int], int] | None:
    """Returns a function from microbatches of the data to those that the schedule runs; None without stages."""
    num_ranks = ranks.dims.pp
    if num_ranks == 1:
        return None
    schedule, num_stages = pipeline.pipeline_parallel_schedule, pipeline.num_stages(num_ranks)
    # Checked at the first update step only, which is full; validation and an epoch's end may be short.
    is_checked = not ranks.is_zero

    def to_run(num_microbatches: int) -> int:
        nonlocal is_checked
        if num_microbatches < num_ranks and not is_checked:
            logger.warning(
                f"pipeline_parallel_dim={num_ranks}: a step of {num_microbatches} microbatches "
                "leaves most ranks idle; set a smaller max_tokens_per_microbatch or batch_size"
            )
        is_checked = True
        return num_microbatches_to_run(num_microbatches, schedule, num_ranks, num_stages)

    return to_run


def pipeline_on_ranks(pipeline: PipelineSettings, data: DataSettings, ranks: RankSettings) -> Iterator[Problem]:
    """Yields problems of the pipeline with ranks and data."""
    num_ranks, dims = ranks.pipeline_parallel_dim, ranks.dims_or_none
    if num_ranks == 1:
        return
    # Stages of older versions need one shape for all microbatches.
    if TorchVersion(torch.__version__) < "2.13":
        text = f"it needs torch 2.13, this is {torch.__version__}; set it to 1"
        yield Problem("pipeline_parallel_dim", text, num_ranks)
    try:
        num_stages = pipeline.num_stages(num_ranks)
    except ConfigError as error:
        yield from error.problems
        return
    if ranks.tensor_parallel_dim > 1:
        text = f"it cannot be combined with pipeline_parallel_dim={num_ranks}; set one of the two to 1"
        yield Problem("tensor_parallel_dim", text, ranks.tensor_parallel_dim)
    if data.plans_by_tokens or dims is None:
        return
    try:
        num_microbatches = data.num_accumulated(dims.dp_degree)
    except ValueError:
        return
    # Without a token budget each rank has the configured number of microbatches, to which no dummy one is added.
    schedule, least = pipeline.pipeline_parallel_schedule, max(num_microbatches, num_ranks)
    to_run = num_microbatches_to_run(least, schedule, num_ranks, num_stages)
    if num_microbatches != to_run:
        samples = data.samples_per_update_step(dims.dp_degree)
        # Every such config has pipeline_parallel_dim, and may have either key of the update step's size.
        sizes = {"gradient_accumulation_steps": to_run, "global_batch_size": to_run * data.batch_size * dims.dp_degree}
        given = [key for key in sizes if getattr(data, key)] or ["gradient_accumulation_steps"]
        more = " and ".join(f"{key}={sizes[key]}" for key in given)
        yield Problem(
            "pipeline_parallel_dim",
            f"with {num_stages} stages and pipeline_parallel_schedule={schedule} it needs {to_run} "
            f"microbatches or more per update step, which has {num_microbatches} of {data.batch_size} "
            f"samples ({-(-samples // dims.dp_degree)} on each of {dims.dp_degree} data-parallel ranks, "
            f"{samples} in all); set {more}, or a smaller batch_size",
            num_ranks,
        )


def has_several_stages_per_rank(schedule: str) -> bool:
    """Returns True for a schedule of :data:`SCHEDULES` with more than one stage per rank."""
    return issubclass(SCHEDULES[schedule], PipelineScheduleMulti)


def num_microbatches_to_run(num_microbatches: int, schedule: str, num_ranks: int, num_stages: int) -> int:
    """Returns the smallest number of at least ``num_microbatches`` that a schedule accepts.

    1F1B needs one per stage; interleaved ones need equal rounds of at least ``num_ranks``.
    """
    if schedule == "1F1B":
        return max(num_microbatches, num_stages)
    if has_several_stages_per_rank(schedule):
        while num_microbatches % max(num_microbatches // num_ranks, 1):
            num_microbatches += 1
    return num_microbatches
