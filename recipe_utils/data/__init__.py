"""Loaders of datasets: checks of their first samples, order, budget of rows."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
