"""Config keys of devices and ranks."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from recipe_utils.parallel.fsdp import GradientSync
from recipe_utils.parallel.process_group import world_size_from_env
from recipe_utils.parallel.ranks import ParallelDims, Ranks, join_ranks, resolve_device
from recipe_utils.settings.keys import STRICT, Count
from recipe_utils.settings.problems import ConfigError, Problem


@dataclass(frozen=True, config=STRICT)
class RankSettings:
    """Device of each rank and parallelism over ranks."""

    device: str | None = None
    """Device type: ``cpu``, ``cuda``, ...; null selects the accelerator if there is one."""
    data_parallel_replicate_dim: Count = 1
    """Copies of the sharded model (HSDP); 1 for FSDP2."""
    data_parallel_shard_dim: int = -1
    """Ranks that shard one copy; -1 for all that the other dimensions leave."""
    tensor_parallel_dim: Count = 1
    """Ranks that split each layer by ``tensor_parallel_plan``."""
    pipeline_parallel_dim: Count = 1
    """Ranks in a pipeline of stages."""
    gradient_sync: GradientSync = "each_microbatch"
    """``each_microbatch`` keeps accumulated gradients sharded; ``last_microbatch`` communicates once per update step,
    and keeps them whole until then."""
    process_group_timeout_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Timeout of collectives [s]; null for PyTorch's default."""

    def problems(self) -> Iterator[Problem]:
        """Yields values that do not fit together or this machine."""
        try:
            resolve_device(self.device)
        except ConfigError as error:
            yield from error.problems
        try:
            _ = self.dims
        except ConfigError as error:
            yield from error.problems

    @property
    def dims_or_none(self) -> ParallelDims | None:
        """Returns :attr:`dims`, or None if they are invalid."""
        try:
            return self.dims
        except ConfigError:
            return None

    @property
    def dims(self) -> ParallelDims:
        """Returns the ranks along each dimension; ConfigError if they do not fit the world size."""
        world_size = world_size_from_env()
        replicate, shard = self.data_parallel_replicate_dim, self.data_parallel_shard_dim
        tp, pp = self.tensor_parallel_dim, self.pipeline_parallel_dim
        if shard == -1:
            shard = max(world_size // (replicate * tp * pp), 1)
        if shard < 1:
            text = "it must be at least 1, or -1 for all ranks that the other dimensions leave"
            raise ConfigError(Problem("data_parallel_shard_dim", text, shard))
        num_ranks = replicate * shard * tp * pp
        if num_ranks != world_size:
            keys = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel")
            product = " * ".join(f"{key}_dim={getattr(self, f'{key}_dim')}" for key in keys)
            text = (
                f"they make {num_ranks} ranks, but {world_size} run; set them so that their product "
                f"is {world_size}, or start {num_ranks} processes (--nproc_per_node)"
            )
            raise ConfigError(Problem(product, text))
        return ParallelDims(replicate, shard, tp, pp)

    def join(self) -> Ranks:
        """Joins the process group of these ranks; see :func:`.join_ranks`."""
        return join_ranks(self.device, self.dims, self.process_group_timeout_seconds, self.gradient_sync)
