"""Configuration: keys with types, defaults and checks, read from YAML."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
