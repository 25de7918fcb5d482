"""Assignment of samples to update steps and ranks.

Update step ``k`` is the ``k``-th run of ``global_batch_size`` samples (see :class:`Cuts`) of the epoch's seeded
permutation; data-parallel (DP) ranks take its samples in turn. So its samples do not depend on the
number of ranks, and training resumes from (epoch, update step) without further state.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from recipe_utils.data.order import NUM_IN_MEMORY, LazyPermutation, seed_of


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


def epoch_permutation(
    num_samples: int, epoch: int, shuffle: bool, seed: int = 0, is_lazy: bool = False
) -> Any:
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
    num_samples: int,
    global_batch_size: int,
    last_update_step: str,
    max_steps_per_epoch: int | None = None,
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


class Cuts:
    """Update steps that epochs are cut into, whose size may change at update steps of the training.

    Args:
        sizes: update step of the training -> samples per update step from there on; ascending, from 0 on.
        num_samples, last_update_step, max_steps_per_epoch: as for :func:`num_update_steps`.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        num_samples: int,
        last_update_step: str,
        max_steps_per_epoch: int | None = None,
    ) -> None:
        self._sizes, self._borders, self._num_samples = sizes, list(sizes), num_samples
        self._trains_last = last_update_step == "train"
        self._most = max_steps_per_epoch
        self._first_steps = [0]
        self._pieces: list[list[tuple[int, int, int]]] = []

    def _cut_until(self, epoch: int) -> None:
        """Cuts all epochs up to one: pieces of its first update step, first sample and size."""
        borders = self._borders
        while len(self._pieces) <= epoch:
            pieces, sample, step, begin = list[tuple[int, int, int]](), 0, 0, self._first_steps[-1]
            while True:
                which = bisect_right(borders, begin + step) - 1
                size = self._sizes[borders[which]]
                pieces.append((step, sample, size))
                full_steps, left_over = divmod(self._num_samples - sample, size)
                number = full_steps + (left_over > 0 and self._trains_last)
                if which + 1 == len(borders):
                    break
                to_border = borders[which + 1] - begin - step
                end = sample + to_border * size
                if number < to_border or end >= self._num_samples:
                    break
                step, sample = step + to_border, end
            steps = step + number if self._most is None else min(step + number, self._most)
            self._first_steps.append(begin + steps)
            self._pieces.append(pieces)

    def first_step(self, epoch: int) -> int:
        """Returns the update steps of all epochs before one."""
        self._cut_until(epoch - 1)
        return self._first_steps[epoch]

    def num_steps(self, epoch: int) -> int:
        """Returns the update steps of an epoch."""
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def window(self, epoch: int, step: int) -> slice:
        """Returns the samples of an update step in the order of its epoch; the last may have fewer."""
        self._cut_until(epoch)
        pieces = self._pieces[epoch]
        first, sample, size = pieces[bisect_right(pieces, step, key=lambda piece: piece[0]) - 1]
        start = sample + (step - first) * size
        return slice(start, start + size)

    def step_at(self, epoch: int, samples_consumed: int) -> int:
        """Returns the number of update steps that an epoch's first samples are the samples of."""
        if not samples_consumed:
            return 0
        self._cut_until(epoch)
        pieces = self._pieces[epoch]
        which = bisect_right(pieces, samples_consumed, key=lambda piece: piece[1]) - 1
        first, sample, size = pieces[which]
        return first + (samples_consumed - sample) // size


def shares_of_ranks(global_batch_size: int, dp_degree: int) -> list[int]:
    """Returns the samples of each DP rank in a full update step, in descending order."""
    return [len(range(rank, global_batch_size, dp_degree)) for rank in range(dp_degree)]


def update_step_indices(
    permutation: Any,
    step: int,
    window: slice,
    dp_rank: int,
    dp_degree: int,
    epoch: int = 0,
    block: int = 1,
) -> list[StepIndex]:
    """Returns each :class:`StepIndex` of this DP rank in one update step, in the permutation's order.

    The ranks' shares differ by up to one block, and a rank may get none.

    Args:
        permutation: dataset indices of the epoch, [num_samples].
        step: index of the update step in the epoch.
        window: its samples in the permutation, over all DP ranks.
        dp_rank: data-parallel coordinate of this rank.
        dp_degree: number of ranks that hold different data.
        epoch: index of the epoch.
        block: number of consecutive samples that stay on one rank.
    """
    indices = permutation[window].tolist()
    return [
        StepIndex(index, epoch, step, position, len(indices))
        for position, index in enumerate(indices)
        if position // block % dp_degree == dp_rank
    ]
