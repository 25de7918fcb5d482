"""Rollouts: answers of a policy with rewards or advantages, their datasets, losses and rounds."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
