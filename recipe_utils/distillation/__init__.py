"""Distillation from a teacher: losses and teacher outputs."""

from recipe_utils import exported

__getattr__ = exported({"LinearDistillationLoss": "recipe_utils.distillation.losses"})
