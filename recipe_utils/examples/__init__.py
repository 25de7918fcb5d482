"""Data, tokenizer and initial weights of the embedded defaults, without a download."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
