"""Which samples belong to which update step.

One seeded permutation of the dataset per epoch; update step ``k`` is its ``k``-th run of
``global_batch_size`` samples, dealt out to the data-parallel (DP) ranks in turn. So the set of
samples of an update step depends on the global batch size alone, not on the number of ranks, and
no state beyond (epoch, update step) is needed to go on from anywhere.
"""

from typing import Any

import torch
from torch import Tensor


class StepIndex(int):
    """A dataset index that knows where in the training it stands.

    A dataset that draws at random draws from this, so that a sample is the same on any layout, in any
    worker and after a resume. To every other dataset it is an int.
    """

    epoch: int
    step: int
    """Of the epoch."""
    position: int
    """In the update step, over all DP ranks; the same on any number of them."""
    step_size: int
    """Samples of the update step over all DP ranks."""

    def __new__(
        cls, index: int, epoch: int = 0, step: int = 0, position: int = 0, step_size: int = 1
    ) -> "StepIndex":
        """The index ``index``, at a place."""
        self = super().__new__(cls, index)
        self.epoch, self.step = epoch, step
        self.position, self.step_size = position, step_size
        return self

    @classmethod
    def of(cls, index: int) -> "StepIndex":
        """The same index; a plain int is the only sample of the first update step."""
        return index if isinstance(index, cls) else cls(index)

    def __reduce__(self) -> tuple[Any, ...]:
        """For DataLoader workers."""
        return StepIndex, (int(self), self.epoch, self.step, self.position, self.step_size)


def epoch_permutation(num_samples: int, epoch: int, shuffle: bool, seed: int = 0) -> Tensor:
    """The order in which an epoch visits the dataset.

    The same order as ``torch.utils.data.DistributedSampler`` with this ``seed``, which the stock
    torchtune recipes use with seed 0 whatever the config's ``seed`` says.

    Returns:
        Dataset indices, shape [num_samples], int64.
    """
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
    """Update steps in one epoch.

    Args:
        num_samples: length of the dataset.
        global_batch_size: samples per update step over all DP ranks.
        last_update_step: ``"train"`` trains on the samples left over at the end of an epoch as one
            short update step, ``"drop"`` leaves them out.
        max_steps_per_epoch: upper bound, None for no bound.

    Raises:
        ValueError: the epoch would hold no update step, or ``last_update_step`` is unknown.
    """
    if last_update_step not in ("train", "drop"):
        raise ValueError(
            f"last_update_step={last_update_step}: unknown; set it to 'train' (the short update "
            "step at an epoch's end is trained on) or 'drop' (its samples are left out)"
        )
    full_steps, left_over = divmod(num_samples, global_batch_size)
    if last_update_step == "drop" and full_steps == 0:
        raise ValueError(
            f"last_update_step=drop: the dataset's {num_samples} samples do not fill one update "
            f"step of {global_batch_size} samples; set last_update_step=train or a smaller "
            "global batch size"
        )
    steps = full_steps + (1 if left_over and last_update_step == "train" else 0)
    return steps if max_steps_per_epoch is None else min(steps, max_steps_per_epoch)


def update_step_indices(
    permutation: Tensor,
    step: int,
    global_batch_size: int,
    dp_rank: int,
    dp_degree: int,
    epoch: int = 0,
    block: int = 1,
) -> list[int]:
    """This DP rank's samples of one update step, in the order of the permutation.

    Args:
        permutation: dataset indices of the epoch, shape [num_samples].
        step: index of the update step within the epoch.
        global_batch_size: samples per update step over all DP ranks, a multiple of ``dp_degree * block``.
        dp_rank: this rank's data-parallel coordinate.
        dp_degree: number of ranks that hold different data.
        epoch: that the permutation is of.
        block: so many consecutive samples of the update step stay on one rank.

    Returns:
        Dataset indices, each a :class:`StepIndex`. In an epoch's short last update step the ranks' shares differ by up to one
        block, and a rank may get none.
    """
    window = permutation[step * global_batch_size : (step + 1) * global_batch_size].tolist()
    return [
        StepIndex(index, epoch, step, position, len(window))
        for position, index in enumerate(window)
        if position // block % dp_degree == dp_rank
    ]
