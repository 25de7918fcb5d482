"""Models: construction, parallelism, weights."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "causal_lm": "recipe_utils.models.transformers.causal_lm",
        "lora_causal_lm": "recipe_utils.models.transformers.peft",
    }
)
