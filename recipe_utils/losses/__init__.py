"""Loss modules, which return sums over target tokens."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.losses.attach": "attach_loss build_loss",
        "recipe_utils.losses.cross_entropy": "LinearCrossEntropyLoss",
        "recipe_utils.losses.log_probs": "LinearLogProbs",
    }
)
