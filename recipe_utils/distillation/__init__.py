"""Distillation from a teacher: losses and teacher outputs."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
