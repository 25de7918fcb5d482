"""Preference pairs: dataset, rows, losses and reference."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
