"""Update steps: the data of one optimizer step, decided on the CPU before its first forward."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
