"""Optimizers, gradient norms and non-finite gradients."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
