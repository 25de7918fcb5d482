"""fp64 in place of the fp32 that models use in any precision, such as in norms and softmaxes."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDER: dict[Any, Any] = {torch.float32: torch.float64, "torch.FloatTensor": "torch.DoubleTensor"}


class DoublePrecision(TorchFunctionMode):
    """Replaces fp32 by fp64 in the functions that a model calls.

    With ``only_casts``, only in functions of a tensor, except views: other functions make tensors, as
    loading does, or read their bytes.
    """

    def __init__(self, only_casts: bool = False) -> None:
        self._only_casts = only_casts

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        is_cast = args and isinstance(args[0], Tensor) and func is not torch.Tensor.view
        if is_cast or not self._only_casts:
            args = tuple(map(_wider, args))
            kwargs = {key: _wider(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, (torch.dtype, str)) else value
