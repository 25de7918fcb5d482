"""Loss modules, which return sums over target tokens."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
