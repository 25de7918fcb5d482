"""Runs all microbatches of an update step through one schedule of pipeline stages.

The bubble, the time in which ranks wait for the first microbatch to reach them and for the last to come
back, is paid once per schedule: a fraction (p - 1) / (m + p - 1) of the time with p ranks and m
microbatches. Here m are all microbatches of the update step. Schedules are those of
torch.distributed.pipelining.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import DTensor

from recipe_utils.data.collate import Microbatch

SCHEDULES: dict[str, Any] = {
    "1F1B": Schedule1F1B,
    "GPipe": ScheduleGPipe,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
}


class PipelineError(RuntimeError):
    """A stage failed; names the stage and the microbatch."""


def has_several_stages_per_rank(schedule: str) -> bool:
    """Whether a schedule of :data:`SCHEDULES` wants more than one stage on each rank."""
    return issubclass(SCHEDULES[schedule], PipelineScheduleMulti)


def splits_backward(schedule: str) -> bool:
    """Whether a schedule runs the backward for inputs and the one for weights apart."""
    return "ZeroBubble" in schedule


def stages_of_rank(pp_rank: int, num_ranks: int, num_stages: int) -> range:
    """The stages on a rank: every ``num_ranks``-th."""
    return range(pp_rank, num_stages, num_ranks)


def num_microbatches_to_run(
    num_microbatches: int, *, schedule: str, num_ranks: int, num_stages: int
) -> int:
    """The smallest number of microbatches, from ``num_microbatches`` on, that a schedule accepts.

    1F1B wants as many as stages. The interleaved ones go in rounds of at least as many microbatches as
    ranks, all rounds alike.
    """
    if schedule == "1F1B":
        return max(num_microbatches, num_stages)
    if has_several_stages_per_rank(schedule):
        while num_microbatches % max(num_microbatches // num_ranks, 1):
            num_microbatches += 1
    return num_microbatches


class Pipeline:
    """This rank's stages, and the schedules that run microbatches through all of them.

    Microbatches may differ in shape. Gradients accumulate unsharded until the last microbatch's backward,
    then FSDP2 reduces them; they are never scaled.

    Args:
        stages: the stages on this rank by their index: decoders after
            :func:`recipe_utils.model.stages.keep_stage`, wrapped and materialised. The last one
            returns the summed loss.
        num_stages: of the whole pipeline.
        schedule: key of :data:`SCHEDULES`.
        embed_dim: width of the hidden states.
        dtype: of the hidden states.
        device: of the stages.
        group: the ranks of this pipeline, in the order of their stages.
        output_is_tied: the first stage's embeddings and the last one's output share their weight. Each has
            a copy, whose gradients are summed.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        num_stages: int,
        schedule: str,
        embed_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        output_is_tied: bool = False,
    ) -> None:
        self._stages = [
            _Stage(stage, index, num_stages, embed_dim, dtype, device, group)
            for index, stage in stages.items()
        ]
        self._schedule_class = SCHEDULES[schedule]
        self._takes_one_stage = not has_several_stages_per_rank(schedule)
        self._num_ranks = dist.get_world_size(group)
        self._device = device
        self._schedules: dict[tuple[int, bool], Any] = {}
        self._tied_group: dist.ProcessGroup | None = None
        self._copies_of_tied: list[nn.Module] = []
        if output_is_tied:
            self._tied_group = _group_of_first_and_last(group)
            self._copies_of_tied = [
                stage.submod.tok_embeddings
                for stage in self._stages
                if stage.is_first or stage.is_last
            ]

    def forward_backward(
        self, microbatches: Sequence[Microbatch], scale: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Forwards and backwards of a whole update step; gradients accumulate in the stages' parameters.

        Args:
            microbatches: on the device, as many on all ranks, at least
                :func:`num_microbatches_to_run`; on every rank of the pipeline the same.
            scale: makes of a microbatch's summed loss [] what its backward starts from.

        Returns:
            The sum of the scaled losses, shape []; as a mean over the ranks of the pipeline, because only
            the rank of the last stage has it.

        Raises:
            PipelineError: a stage on this rank failed; the other ranks' receives fail or time out.
        """
        loss = self._run(microbatches, scale, has_backward=True)
        for copy in self._copies_of_tied:
            gradient: Any = copy.weight.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=self._tied_group)
        return loss

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """The summed loss of microbatches, as :meth:`forward_backward` gives it, and no gradients."""
        return self._run(microbatches, lambda loss_sum: loss_sum, has_backward=False)

    def parameters_counted_elsewhere(self) -> frozenset[int]:
        """Ids of this rank's parameters that are copies of the first stage's."""
        return frozenset(
            id(stage.submod.tok_embeddings.weight)
            for stage in self._stages
            if stage.is_last and self._copies_of_tied
        )

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        scale: Callable[[Tensor], Tensor],
        has_backward: bool,
    ) -> Tensor:
        schedule = self._schedule_of(len(microbatches), has_backward)
        inputs = [dict(microbatch.inputs) for microbatch in microbatches]
        tokens = [(kwargs.pop("tokens"),) for kwargs in inputs]
        for kwargs, microbatch in zip(inputs, microbatches, strict=True):
            kwargs["targets"] = microbatch.targets
        for stage in self._stages:
            stage.has_backward = has_backward
            stage.expect([(*of_first.shape,) for (of_first,) in tokens])
        losses: list[Tensor] = []
        # Not its step(), which would cut one big batch into microbatches of one shape.
        schedule._step_microbatches(
            tokens, inputs, [scale] * len(microbatches), losses, return_outputs=False
        )
        for stage in self._stages:
            stage.clear_runtime_states()
        total = torch.zeros((), device=self._device)
        for loss in losses:
            total += loss.detach()
        return total * self._num_ranks

    def _schedule_of(self, num_microbatches: int, has_backward: bool) -> Any:
        key = num_microbatches, has_backward
        if key not in self._schedules:
            schedule = self._schedule_class(
                self._stages[0] if self._takes_one_stage else self._stages,
                num_microbatches,
                loss_fn=lambda loss_sum, scale: scale(loss_sum),
                scale_grads=False,  # the default divides by the number of microbatches
            )
            schedule._has_backward = has_backward
            self._schedules[key] = schedule
        return self._schedules[key]


class _Stage(PipelineStage):
    """Passes on one tensor of hidden states per microbatch, each of its microbatch's own shape.

    PyTorch's own stages have room for all microbatches at once and for one shape. Here a tensor lives
    from its receive to its use. Shapes need not be told: every rank of a pipeline has the tokens.
    """

    submod: Any

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        embed_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        hidden = torch.zeros(1, 1, embed_dim, dtype=dtype, device=device)
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
        loss = torch.zeros((), device=device)
        super().__init__(
            module,
            index,
            num_stages,
            device,
            # With examples at hand PyTorch does not run a microbatch to find out what a stage takes and gives.
            input_args=tokens if index == 0 else hidden,
            output_args=loss if index == num_stages - 1 else hidden,
            group=group,
        )
        self._like = hidden
        self._shapes: list[tuple[int, ...]] = []
        self._activations: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}

    def expect(self, shapes: list[tuple[int, ...]]) -> None:
        """Gets ready for microbatches of these shapes [b, s]."""
        self.clear_runtime_states()
        self.chunks = len(shapes)
        self._shapes = shapes

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._activations.clear()
        self._gradients.clear()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        self._activations[fwd_chunk_id] = self._room_for(fwd_chunk_id)
        return [self._op(dist.irecv, self._activations[fwd_chunk_id], self.stage_index - 1)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        (output,), _ = self.fwd_cache[fwd_chunk_id]
        return [self._op(dist.isend, output.detach(), self.stage_index + 1)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        self._gradients[bwd_chunk_id] = self._room_for(bwd_chunk_id)
        return [self._op(dist.irecv, self._gradients[bwd_chunk_id], self.stage_index + 1)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
        assert gradient is not None
        return [self._op(dist.isend, gradient, self.stage_index - 1)]

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor]:
        return (self._activations.pop(fwd_chunk_id).requires_grad_(self.has_backward),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor]:
        return (self._gradients.pop(bwd_chunk_id),)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._naming("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._naming("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._naming("backward of the weights", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _room_for(self, chunk_id: int) -> Tensor:
        return self._like.new_empty((*self._shapes[chunk_id], self._like.shape[-1]))

    def _op(self, op: Any, tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(
            op, tensor.contiguous(), self._resolve_peer_global_rank(stage), self.group
        )

    @contextmanager
    def _naming(self, what: str, chunk_id: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            cause = error.__cause__ or error  # PyTorch wraps it in a dump of all arguments
            raise PipelineError(
                f"pipeline stage {self.stage_index} of {self.num_stages}, microbatch {chunk_id} of "
                f"{self.chunks}: its {what} failed ({type(cause).__name__}: {cause})"
            ) from cause


def _group_of_first_and_last(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """A group of the first and the last rank of each pipeline; the one of this rank's pipeline.

    All ranks of the job must call it, since all take part in making every group.
    """
    pipelines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, dist.get_process_group_ranks(group))
    ends = sorted({(ranks[0], ranks[-1]) for ranks in pipelines})
    own, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in ends])
    return own
