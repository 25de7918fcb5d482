"""Assignment of samples to update steps and ranks.

Update step ``k`` is the ``k``-th run of ``global_batch_size`` samples of the epoch's seeded permutation;
data-parallel (DP) ranks take its samples in turn. So its samples do not depend on the
number of ranks, and training resumes from (epoch, update step) without further state.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from recipe_utils.update_steps.permutation import NUM_IN_MEMORY, LazyPermutation, seed_of


class StepIndex(NamedTuple):
    """Dataset index with its position in the training.

    A dataset that seeds its random draws with it returns the same sample on any layout, in any
    worker, and after a resume. It has an attribute ``takes_step_index``; others get ``item``.
    """

    item: int
    """Index in the dataset."""
    epoch: int = 0
    step: int = 0
    """Index of the update step in the epoch."""
    position: int = 0
    """Position in the update step, over all DP ranks; the same on any number of them."""
    step_size: int = 1
    """Samples of the update step over all DP ranks."""

    def __str__(self) -> str:
        return str(self.item)


class UpdateSteps(Sequence[list[StepIndex]]):
    """Dataset indices of each update step, computed on demand.

    Args:
        steps: indices of the update steps in their epoch.
        indices_of: returns the dataset indices of an update step.
    """

    def __init__(self, steps: range, indices_of: Callable[[int], list[StepIndex]]) -> None:
        self._steps, self._indices_of = steps, indices_of

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return UpdateSteps(self._steps[which], self._indices_of)
        return self._indices_of(self._steps[which])


def epoch_permutation(num_samples: int, epoch: int, shuffle: bool, seed: int = 0, is_lazy: bool = False) -> Any:
    """Returns the dataset indices of an epoch in order, [num_samples] int64.

    Up to :data:`.NUM_IN_MEMORY` samples, a tensor with the order of
    ``torch.utils.data.DistributedSampler`` with this seed. Stock torchtune recipes use seed 0 for
    any ``seed`` of the config. Beyond, or if ``is_lazy``, slices of a :class:`.LazyPermutation` are
    computed.
    """
    if is_lazy or num_samples > NUM_IN_MEMORY:
        return LazyPermutation(num_samples, seed_of(seed, epoch) if shuffle else None)
    if not shuffle:
        return torch.arange(num_samples)
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(num_samples, generator=generator)


def num_update_steps(
    num_samples: int, global_batch_size: int, last_update_step: str, max_steps_per_epoch: int | None = None
) -> int:
    """Returns the number of update steps in an epoch; raises ValueError if there is none.

    ``last_update_step="train"`` counts the samples left at the end as a short update step,
    ``"drop"`` does not.
    """
    full_steps, left_over = divmod(num_samples, global_batch_size)
    if last_update_step == "drop" and full_steps == 0:
        raise ValueError(
            f"last_update_step=drop: the dataset's {num_samples} samples do not fill one update "
            f"step of {global_batch_size} samples; set last_update_step=train or a smaller "
            "global batch size"
        )
    steps = full_steps + (left_over > 0 and last_update_step == "train")
    return steps if max_steps_per_epoch is None else min(steps, max_steps_per_epoch)


class Order(Protocol):
    """Samples of each update step, over all DP ranks."""

    samples_per_epoch: int
    """Samples of an epoch, before it is cut to update steps."""
    steps_per_epoch: int

    @abstractmethod
    def samples(self, epoch: int, step: int) -> Any:
        """Returns the dataset indices of an update step, [at most ``global_batch_size`` samples]."""


class ShuffledOrder(Order):
    """Runs of ``global_batch_size`` samples of an epoch's permutation, see :func:`epoch_permutation`.

    ``steps_per_epoch`` are those of :func:`num_update_steps`.
    """

    def __init__(
        self, num_samples: int, global_batch_size: int, steps_per_epoch: int, shuffle: bool, seed: int = 0
    ) -> None:
        self.samples_per_epoch, self._size = num_samples, global_batch_size
        self.steps_per_epoch = steps_per_epoch
        self._permutation = lru_cache(maxsize=1)(lambda epoch: epoch_permutation(num_samples, epoch, shuffle, seed))

    def samples(self, epoch: int, step: int) -> Any:
        """Returns the dataset indices of an update step; the last one of an epoch may have fewer."""
        return self._permutation(epoch)[step * self._size : (step + 1) * self._size]


def shares_of_ranks(global_batch_size: int, dp_degree: int) -> list[int]:
    """Returns the samples of each DP rank in a full update step, in descending order."""
    return [len(range(rank, global_batch_size, dp_degree)) for rank in range(dp_degree)]


def update_step_indices(
    items: Any, epoch: int, step: int, dp_rank: int, dp_degree: int, block: int = 1
) -> list[StepIndex]:
    """Returns each :class:`StepIndex` of this DP rank in one update step, in order.

    The ranks' shares differ by up to one block, and a rank may get none.

    Args:
        items: dataset indices of the update step over all DP ranks, an array or tensor [samples].
        epoch: index of the epoch.
        step: index of the update step in the epoch.
        dp_rank: data-parallel coordinate of this rank.
        dp_degree: number of ranks that hold different data.
        block: number of consecutive samples that stay on one rank.
    """
    return [
        StepIndex(item, epoch, step, position, len(items))
        for position, item in enumerate(items.tolist())
        if position // block % dp_degree == dp_rank
    ]
