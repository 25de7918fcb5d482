"""Orders of samples that are computed by index, so that memory does not grow with their number."""

from typing import Any

import numpy as np
import torch

NUM_IN_MEMORY = 2**24
"""Maximum number of samples whose order is an array (``torch.randperm``)."""

_NUM_ROUNDS = 6
_U64 = np.uint64


def mixed(values: np.ndarray) -> np.ndarray:
    """Returns hashes of integers [n] uint64, the output function of splitmix64 (Steele et al., 2014)."""
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def seed_of(*numbers: int) -> int:
    """Returns a seed below 2**63 that depends on all numbers and their order."""
    state = np.zeros(1, dtype=_U64)
    for number in numbers:
        state = mixed(state + _U64(0x9E3779B97F4A7C15) + np.array([number % 2**64], dtype=_U64))
    return int(state[0]) >> 1


class LazyPermutation:
    """Permutation of ``range(num)``, computed for the requested positions only.

    A Feistel network over the next power of 4, applied again to values outside (cycle walking;
    Black and Rogaway, 2002). Integers only, so it is the same on every machine. Without a seed it is
    the identity.
    """

    def __init__(self, num: int, seed: int | None) -> None:
        self._num = num
        self._half = _U64(max((max(num - 1, 1).bit_length() + 1) // 2, 1))
        self._keys = [] if seed is None else [_U64(seed_of(seed, i)) for i in range(_NUM_ROUNDS)]

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, window: slice) -> np.ndarray:
        """Returns the integers at consecutive positions, [n] int64."""
        indices = self._encrypted(np.arange(*window.indices(self._num)).astype(_U64))
        while (is_outside := indices >= self._num).any():
            indices[is_outside] = self._encrypted(indices[is_outside])
        return indices.astype(np.int64)

    def _encrypted(self, values: np.ndarray) -> np.ndarray:
        mask = (_U64(1) << self._half) - _U64(1)
        left, right = values >> self._half, values & mask
        for key in self._keys:
            left, right = right, left ^ (mixed(right + key) & mask)
        return (left << self._half) | right


def epoch_permutation(num_samples: int, epoch: int, shuffle: bool, seed: int = 0, is_lazy: bool = False) -> Any:
    """Returns the dataset indices of an epoch in order, [num_samples] int64.

    Up to :data:`NUM_IN_MEMORY` samples, a tensor with the order of
    ``torch.utils.data.DistributedSampler`` with this seed. Stock torchtune recipes use seed 0 for
    any ``seed`` of the config. Beyond, or if ``is_lazy``, slices of a :class:`LazyPermutation` are
    computed.
    """
    if is_lazy or num_samples > NUM_IN_MEMORY:
        return LazyPermutation(num_samples, seed_of(seed, epoch) if shuffle else None)
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(num_samples, generator=generator)
