"""A model that follows another one's weights."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class MovingAverage:
    """The moving average of a model's weights over update steps, in place, each rank of its own shards.

    (Polyak and Juditsky 1992; as a teacher Tarvainen and Valpola, arXiv:1703.01780.) What is split over ranks is
    split alike in both, so nothing is communicated.

    Args:
        average: of the same builder, wrapped, cut and sharded alike, with weights.
        model: that it follows.
    """

    def __init__(self, average: nn.Module, model: nn.Module) -> None:
        self._average = average
        self._model = model

    @torch.no_grad()
    def update(self, momentum: float, grad_norm: Tensor | None = None) -> None:
        """Average = momentum * average + (1 - momentum) * model. Does not wait for the device.

        Args:
            momentum: from 0, a copy, to 1.
            grad_norm: of the update step, []; where it is not finite a fused optimizer has left the
                step out on the device, and so does this. None where it was taken.
        """
        averages, followed = (_local_weights(each) for each in (self._average, self._model))
        if not averages:
            return
        if grad_norm is None:
            torch._foreach_lerp_(averages, followed, 1.0 - momentum)
            return
        is_taken = grad_norm.isfinite()
        for dtype in {each.dtype for each in averages}:
            of_dtype = [i for i, each in enumerate(averages) if each.dtype == dtype]
            weights = [is_taken.to(dtype) * (1.0 - momentum)] * len(of_dtype)
            torch._foreach_lerp_(
                [averages[i] for i in of_dtype], [followed[i] for i in of_dtype], weights
            )


def _local_weights(model: nn.Module) -> list[Tensor]:
    """This rank's shards of the parameters, in the order of their names."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without a backward leaves the root's parameters unsharded
    return [
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for _, parameter in sorted(model.named_parameters())
    ]
