"""States of a process's random number generators as tensors, which can be read without unpickling."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def get_random_state() -> dict[str, Tensor]:
    """Returns the states of the global generators of Python, NumPy, PyTorch and the current CUDA device.

    Returns:
        Generator name -> state. ``python`` int64 [625] and ``python_gauss`` float64 [0 or 1],
        ``numpy`` int64 [625] and ``numpy_gauss`` float64 [0 or 1], ``torch`` uint8 [5056], and with
        CUDA ``cuda`` uint8 [16]. ``*_gauss`` is the second normal of a pair, if it is not used yet.
    """
    # Python and NumPy: 624 words of the Mersenne Twister and the position in them.
    _, words, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    _, key, position, has_gauss, numpy_gauss = numpy
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": _tensor_of(gauss),
        "numpy": torch.tensor([*key.tolist(), position], dtype=torch.int64),
        "numpy_gauss": _tensor_of(numpy_gauss if has_gauss else None),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Restores states of :func:`get_random_state`; generators without a state are left unchanged.

    Raises ValueError if a state is invalid.
    """
    try:
        if "python" in states:
            random.setstate((3, tuple(states["python"].tolist()), _value_of(states["python_gauss"])))
        if "numpy" in states:
            *key, position = states["numpy"].tolist()
            gauss = _value_of(states["numpy_gauss"])
            np.random.set_state(("MT19937", np.array(key, np.uint32), position, int(gauss is not None), gauss or 0.0))
        if "torch" in states:
            torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (LookupError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"not the state of a random number generator: {error}") from error


def seed_generators(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and PyTorch's CPU device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _tensor_of(value: float | None) -> Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)


def _value_of(tensor: Tensor) -> float | None:
    return tensor.item() if tensor.numel() else None
