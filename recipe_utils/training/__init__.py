"""A training: loop, log, checkpoints."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
