"""Decoders of transformers: built from a local folder, and proved at start-up to compute what they should."""

from recipe_utils.model.transformers.adapters import lora_causal_lm
from recipe_utils.model.transformers.build import causal_lm

__all__ = ["causal_lm", "lora_causal_lm"]
