"""Optimizers, gradient norms, schedules and non-finite gradients."""

from recipe_utils import exported

__getattr__ = exported({"AdamW8bit": "recipe_utils.optim.adamw_8bit", "Split": "recipe_utils.optim.split"})
