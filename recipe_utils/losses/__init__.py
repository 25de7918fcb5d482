"""Loss modules, which return sums over target tokens."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "LinearCrossEntropyLoss": "recipe_utils.losses.cross_entropy",
        "LinearLogProbs": "recipe_utils.losses.log_probs",
    }
)
