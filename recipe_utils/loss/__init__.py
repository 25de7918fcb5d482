"""What a forward ends in: sums over target tokens."""

from recipe_utils.loss.head import LinearCrossEntropyLoss

__all__ = ["LinearCrossEntropyLoss"]
