"""Loss modules, which return sums over target tokens."""

from recipe_utils.loss.distillation import LinearDistillationLoss
from recipe_utils.loss.linear_cross_entropy import LinearCrossEntropyLoss

__all__ = ["LinearCrossEntropyLoss", "LinearDistillationLoss"]
