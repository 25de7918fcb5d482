"""Preference pairs: dataset, rows and losses."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
