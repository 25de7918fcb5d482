"""Optimizers, gradient norms, schedules and non-finite gradients."""

from recipe_utils.optim.adamw_8bit import AdamW8bit

__all__ = ["AdamW8bit"]
