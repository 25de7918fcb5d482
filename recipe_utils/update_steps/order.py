"""Which samples an update step consists of, over all ranks: arithmetic, without any state.

48 samples, 4 in an update step, two ranks. The permutation of epoch 0 is 44 22 29 18 | 23 20 19 41 | ..., so update
step 0 is [44, 22, 29, 18] on any number of ranks; rank 0 takes samples 44 and 29, rank 1 samples 22 and 18. After it
4 samples are consumed: (epoch 0, 4 samples) is all that a checkpoint keeps, and on 3 ranks update step 1 is still
[23, 20, 19, 41].
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from recipe_utils.update_steps.permutation import epoch_permutation


class StepIndex(NamedTuple):
    """Dataset index with its position in the training, for datasets whose facts are ``takes_place``.

    One that seeds its random draws with it returns the same sample on any layout, in any worker, and after a resume.
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


class Order(Protocol):
    """Samples of each update step, over all data-parallel (DP) ranks. Mixtures and curricula are other orders."""

    @abstractmethod
    def num_steps(self, epoch: int) -> int:
        """Returns the number of update steps of an epoch."""

    @abstractmethod
    def samples(self, epoch: int, step: int) -> np.ndarray:
        """Returns dataset indices, [samples of the update step] int64."""

    @abstractmethod
    def end(self, epoch: int, step: int) -> int:
        """Returns the samples of the epoch that are consumed after an update step, more than after the one before."""

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns JSON values that must be equal on resume for update steps to contain the same samples."""
        return {}


def num_done(order: Order, epoch: int, samples_consumed: int) -> int:
    """Returns how many update steps of an epoch end within its first ``samples_consumed`` samples."""
    return bisect_right(range(order.num_steps(epoch)), samples_consumed, key=partial(order.end, epoch))


@dataclass(frozen=True)
class ShuffledOrder(Order):
    """Runs of ``global_batch_size`` samples of the epoch's seeded permutation, see :func:`.epoch_permutation`.

    The last one of an epoch may have fewer; ``drop_last`` leaves it out. Raises ValueError if no update step remains.
    """

    num_samples: int
    global_batch_size: int
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    max_steps_per_epoch: int | None = None
    _permutation: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.drop_last and self.num_samples < self.global_batch_size:
            raise ValueError(
                f"last_update_step=drop: the dataset's {self.num_samples} samples do not fill one update step of "
                f"{self.global_batch_size} samples; set last_update_step=train or a smaller global batch size"
            )
        permute = partial(epoch_permutation, self.num_samples, shuffle=self.shuffle, seed=self.seed)
        object.__setattr__(self, "_permutation", lru_cache(maxsize=1)(permute))

    def num_steps(self, epoch: int) -> int:
        """Returns the number of update steps, the same in each epoch."""
        num_full, left_over = divmod(self.num_samples, self.global_batch_size)
        num_steps = num_full + (left_over > 0 and not self.drop_last)
        return min(num_steps, self.max_steps_per_epoch or num_steps)

    def samples(self, epoch: int, step: int) -> np.ndarray:
        """Returns dataset indices, at most ``global_batch_size``."""
        first = step * self.global_batch_size
        return np.asarray(self._permutation(epoch)[first : first + self.global_batch_size])

    def end(self, epoch: int, step: int) -> int:
        """Returns whole update steps, also of a shorter last one."""
        return (step + 1) * self.global_batch_size


@dataclass(frozen=True)
class OnRank(Sequence[list[StepIndex]]):
    """Samples of this DP rank in each of some update steps, computed on demand."""

    order: Order
    epoch: int
    steps: range
    dp_rank: int
    dp_degree: int
    block: int = 1
    """Consecutive samples that stay on one rank; shares of ranks differ by at most as many."""

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return OnRank(self.order, self.epoch, self.steps[which], self.dp_rank, self.dp_degree, self.block)
        step = self.steps[which]
        items = self.order.samples(self.epoch, step).tolist()
        return [
            StepIndex(item, self.epoch, step, position, len(items))
            for position, item in enumerate(items)
            if position // self.block % self.dp_degree == self.dp_rank
        ]

    def most_on_a_rank(self, which: int) -> int:
        """Returns an upper bound of a rank's samples, the same on all ranks."""
        num_samples, block = len(self.order.samples(self.epoch, self.steps[which])), self.block
        return -(-num_samples // (self.dp_degree * block)) * block
