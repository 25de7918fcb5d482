"""Runs all microbatches of an update step through one torch.distributed.pipelining schedule.

Ranks are idle (the pipeline bubble) once per schedule, a fraction (p - 1) / (m + p - 1) of the time with p ranks and m
microbatches: on 4 ranks 27 % for the 8 microbatches of an update step, and 60 % if each 2 of them were a schedule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.torch_version import TorchVersion

from recipe_utils.losses.attach import check_sums
from recipe_utils.models.pipeline.schedule import SCHEDULES, has_several_stages_per_rank, num_microbatches_to_run
from recipe_utils.optim.optimizer import trained_parameters, unwrapped
from recipe_utils.parallel.fsdp import local, reshard
from recipe_utils.parallel.to_device import to_device_ahead
from recipe_utils.update_steps.step import Microbatch


class PipelineError(RuntimeError):
    """Failure of a stage; names the stage and the microbatch."""


class Pipeline:
    """This rank's stages, and the schedules that run microbatches through all stages.

    Microbatches may differ in shape. A stage copies its inputs of a microbatch to the device one
    microbatch ahead and frees them after its backward. Gradients accumulate unsharded until the
    last backward, then FSDP2 reduces them; they are never scaled.

    Args:
        module: stages on this rank by name and index in the whole pipeline (``stage_2``), wrapped and materialized. The
            last one returns sums over its microbatch, [k] or, for k = 1, []; anything for :meth:`outputs`.
        num_stages: stages of the whole pipeline.
        schedule: key of :data:`SCHEDULES`.
        embed_dim: width of the hidden states, which are of ``dtype``.
        group: ranks of this pipeline, in the order of their stages.
        output_is_tied: the first stage's embeddings and the last one's output each have a copy of one weight; the
            copies' gradients are summed.
        num_sums: k, also on ranks without the last stage; unused by :meth:`outputs`.
        fingerprints: those of frozen weights.
    """

    is_cut = True

    def __init__(
        self,
        module: nn.ModuleDict,
        *,
        num_stages: int,
        schedule: str,
        embed_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        output_is_tied: bool = False,
        num_sums: int = 1,
        fingerprints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.module: nn.Module = module
        self.fingerprints = fingerprints
        stages = {int(name.removeprefix("stage_")): stage for name, stage in module.items()}
        hidden = torch.zeros(1, 1, embed_dim, dtype=dtype, device=device)
        self._stages = [_Stage(stage, index, num_stages, hidden, group) for index, stage in stages.items()]
        # NCCL creates a communicator at a group's first call, which blocks for all ranks. In 1F1B that would be a
        # batched send and receive that some ranks reach only after they have received, a deadlock.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        self._schedule_class = SCHEDULES[schedule]
        self._takes_one_stage = not has_several_stages_per_rank(schedule)
        self.group = group
        names: list[Any] = [None] * dist.get_world_size(group)
        trained = chain.from_iterable(map(trained_parameters, stages.values()))
        dist.all_gather_object(names, [*map(unwrapped, trained)], group)
        self.trained_names: Sequence[str] = [*dict.fromkeys(chain(*names))]
        """Names of the trained parameters of all stages, in the order of ranks."""
        self._num_ranks = dist.get_world_size(group)
        self.num_sums = num_sums
        self._shape = schedule, self._num_ranks, num_stages
        self.device = device
        self._schedules: dict[tuple[int, bool], Any] = {}
        self._tied_group = _group_of_first_and_last(group) if output_is_tied else None
        ends = [stage for stage in self._stages if output_is_tied and (stage.is_first or stage.is_last)]
        self._tied_weights = [stage.submod.tok_embeddings.weight for stage in ends]
        # The rank of the first stage adds their norm.
        self.tied_copies = frozenset(id(stage.submod.tok_embeddings.weight) for stage in ends if stage.is_last)

    def forward_backward(self, microbatches: Sequence[Microbatch], objective: Callable[[Tensor], Tensor]) -> Tensor:
        """Runs forwards and backwards of an update step; gradients accumulate in the parameters.

        Args:
            microbatches: on the CPU, the same on every rank of the pipeline, equally many on all
                ranks, as :func:`recipe_utils.models.pipeline.schedule.num_microbatches_to_run`.
            objective: maps a microbatch's sums [k] to the scalar to backpropagate, [], on the rank of the last stage.

        Returns:
            Unscaled sums over all microbatches, [k] in fp64, without a graph, times the number of
            ranks on the last stage and 0 elsewhere: their mean over the pipeline is the sums.

        Raises PipelineError if a stage or the objective fails on this rank; the other ranks' receives fail or time out.
        """
        totals = torch.zeros(self.num_sums, dtype=torch.float64, device=self.device)

        def begin_backward(_: int, output: Tensor) -> Tensor:
            # A clone, because zero-bubble schedules detach it in place, which is an error for a view.
            return objective(self._add_sums(totals, output)).clone()

        self._run(microbatches, begin_backward, has_backward=True)
        for weight in self._tied_weights:
            if weight.requires_grad:  # on both ranks alike
                if weight.grad is None:  # a loss of hidden states alone leaves the output without a gradient
                    weight.grad = torch.zeros_like(weight)
                dist.all_reduce(local(weight.grad), group=self._tied_group)
        return totals * self._num_ranks

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Returns the sums [k] of :meth:`forward_backward`, without gradients."""
        totals = torch.zeros(self.num_sums, dtype=torch.float64, device=self.device)
        self._run(microbatches, lambda _, output: self._add_sums(totals, output), has_backward=False)
        return totals * self._num_ranks

    @torch.no_grad()
    def outputs(self, microbatches: Sequence[Microbatch]) -> dict[int, Any]:
        """Returns the last stage's outputs by microbatch index, on the device, without gradients.

        Empty on ranks without the last stage. No barrier follows: ranks of the first stages may
        continue while the last ones still compute. Any number of microbatches is enough: the first
        one is repeated where the schedule needs more.
        """
        outputs: dict[int, Any] = {}
        num_wanted = len(microbatches)
        num_missing = num_microbatches_to_run(num_wanted, *self._shape) - num_wanted
        self._run([*microbatches, *[microbatches[0]] * num_missing], outputs.__setitem__, has_backward=False)
        return {index: output for index, output in outputs.items() if index < num_wanted}

    def norms_over_stages(self, norms: Tensor) -> Tensor:
        """Returns norms [n] of the gradients of all stages, from those of this rank's."""
        of_stages = [torch.empty_like(norms) for _ in range(self._num_ranks)]
        dist.all_gather(of_stages, norms, group=self.group)
        return torch.linalg.vector_norm(torch.stack(of_stages), dim=0)

    def _add_sums(self, totals: Tensor, output: Tensor) -> Tensor:
        check_sums(output, self.num_sums)
        totals += output.detach()
        return output.reshape(-1)

    def _run(
        self, microbatches: Sequence[Microbatch], take: Callable[[int, Any], Tensor | None], has_backward: bool
    ) -> None:
        """Runs microbatches through all stages; ``take`` gets the index and the output of each after the last stage.

        With ``has_backward`` it returns the scalar to backpropagate, [].
        """
        self._take = take
        for stage in self._stages:
            stage.expect(microbatches, has_backward)
        indices = list(range(len(microbatches)))
        key = len(microbatches), has_backward
        if key not in self._schedules:
            self._schedules[key] = self._schedule_class(
                self._stages[0] if self._takes_one_stage else self._stages,
                len(microbatches),
                loss_fn=self._take_output,
                scale_grads=False,  # the default divides by the number of microbatches
            )
        schedule = self._schedules[key]
        # Always with the same ``has_backward``: a change synchronizes ranks.
        if TorchVersion(torch.__version__) >= "2.14":
            run = schedule.step if has_backward else schedule.eval
            run(target_mbs=indices, return_outputs=False)
        else:
            # step() would split one large batch into microbatches of one shape.
            schedule._has_backward = has_backward
            schedule._step_microbatches(target_mbs=indices, return_outputs=False)
        del self._take  # it may refer to all outputs
        for stage in self._stages:
            stage.clear_runtime_states()
            if not has_backward:
                reshard(stage.submod)

    def _take_output(self, output: Any, index: int) -> Any:
        last = next(stage for stage in self._stages if stage.is_last)
        with last.naming("objective", index):
            return self._take(index, output)


class _Stage(PipelineStage):
    """Stage that sends one tensor of hidden states per microbatch, in the microbatch's own shape.

    PyTorch's stages need one shape for all microbatches, and in 2.13 receive buffers for all of
    them at once. Here a buffer lives from its receive to its use. Every rank of a pipeline has the
    tokens, so it has the shapes and copies its inputs to the device itself.
    """

    submod: Any

    def __init__(
        self, module: nn.Module, index: int, num_stages: int, hidden: Tensor, group: dist.ProcessGroup
    ) -> None:
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)
        super().__init__(
            module,
            index,
            num_stages,
            hidden.device,
            # With examples PyTorch does not run a microbatch to infer the shapes of inputs and outputs.
            input_args=tokens if index == 0 else hidden,
            output_args=torch.zeros((), device=hidden.device) if index == num_stages - 1 else hidden,
            group=group,
        )
        self._like = hidden
        self._shapes: list[torch.Size] = []
        self._inputs: Iterator[tuple[int, dict[str, Any]]] = iter(())
        self._activations: dict[int, Tensor] = {}
        self._to_send: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}

    def expect(self, microbatches: Sequence[Microbatch], has_backward: bool) -> None:
        """Prepares for microbatches, which stay on the CPU until shortly before their forward."""
        self.clear_runtime_states()
        self.has_backward = has_backward
        self.chunks = len(microbatches)
        self._shapes = [microbatch.inputs["tokens"].shape[:2] for microbatch in microbatches]
        # In the order of their forwards: all schedules forward microbatches in order.
        inputs = [dict(microbatch.inputs) for microbatch in microbatches]
        for microbatch_inputs, microbatch in zip(inputs, microbatches, strict=True):
            if not self.is_first:
                del microbatch_inputs["tokens"]
            if self.is_last:
                microbatch_inputs["targets"] = microbatch.targets
        self._inputs = to_device_ahead(enumerate(inputs), self.device)

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._activations.clear()
        self._to_send.clear()
        self._gradients.clear()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        self._activations[fwd_chunk_id] = self._empty_hidden(fwd_chunk_id)
        return [self._op(dist.irecv, self._activations[fwd_chunk_id], self.stage_index - 1)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        return [self._op(dist.isend, self._to_send.pop(fwd_chunk_id), self.stage_index + 1)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        self._gradients[bwd_chunk_id] = self._empty_hidden(bwd_chunk_id)
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

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Any:
        with self.naming("forward", fwd_chunk_id):
            index, inputs = next(self._inputs)
            assert index == fwd_chunk_id, f"microbatch {index} comes before {fwd_chunk_id}"
            args = (inputs.pop("tokens"),) if self.is_first else ()
            output = super().forward_one_chunk(fwd_chunk_id, args, inputs, save_forward_output=False)
        if not self.has_backward:
            super().clear_runtime_states()  # frees what a backward would need
        if not self.is_last:
            self._to_send[fwd_chunk_id] = output.detach()
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.naming("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.naming("backward of the weights", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    @contextmanager
    def naming(self, what: str, chunk_id: int) -> Iterator[None]:
        """Converts exceptions to a :class:`PipelineError` with the stage and the microbatch."""
        try:
            yield
        except Exception as error:
            cause = error.__cause__ or error  # PyTorch wraps it in a dump of all arguments
            raise PipelineError(
                f"pipeline stage {self.stage_index} of {self.num_stages}, microbatch {chunk_id} of "
                f"{self.chunks}: its {what} failed ({type(cause).__name__}: {cause})"
            ) from cause

    def _empty_hidden(self, chunk_id: int) -> Tensor:
        return self._like.new_empty((*self._shapes[chunk_id], self._like.shape[-1]))

    def _op(self, op: Any, tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(op, tensor.contiguous(), self._resolve_peer_global_rank(stage), self.group)


def _group_of_first_and_last(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Returns the group of the first and last rank of this rank's pipeline.

    All ranks of the job must call it, since creating a group is collective.
    """
    pipelines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, dist.get_process_group_ranks(group))
    ends = sorted({(ranks[0], ranks[-1]) for ranks in pipelines})
    ends_of_this_pipeline, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in ends])
    return ends_of_this_pipeline if isinstance(ends_of_this_pipeline, dist.ProcessGroup) else None
