"""Advantages of a group's answers, from their rewards.

Example: rewards 1, 0, 0, 0 have the mean 0.25 and the standard deviation 0.5. The advantages of the first answer and of the
others are 0.75 and -0.25 (``mean``), 1.5 and -0.5 (``mean_std``), 1 and -0.33 (``leave_one_out``).
"""

from collections.abc import Callable, Mapping

import numpy as np

_EPSILON = 1e-6
"""Added to the standard deviation, as in verl; TRL adds 1e-4."""


def mean(rewards: np.ndarray) -> np.ndarray:
    """Returns rewards [m] minus their mean (Dr. GRPO, arXiv:2503.20783)."""
    from_first = rewards - rewards[0]  # exactly 0 if all are equal; the mean of three times 0.1 is not 0.1
    return from_first - from_first.mean()


def mean_std(rewards: np.ndarray) -> np.ndarray:
    """Returns the same over their standard deviation, with m - 1 (GRPO, arXiv:2402.03300)."""
    return mean(rewards) / (rewards.std(ddof=1) + _EPSILON)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Returns each reward minus the mean of the others (RLOO, arXiv:2402.14740)."""
    return mean(rewards) * len(rewards) / (len(rewards) - 1)


OF_REWARDS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": mean,
    "mean_std": mean_std,
    "leave_one_out": leave_one_out,
}
"""Name in configs -> function of a group's rewards."""
