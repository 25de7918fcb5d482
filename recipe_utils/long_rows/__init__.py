"""Rows of text that several ranks compute together, because one sample is too long for one rank."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
