"""Loss modules, which return sums over target tokens."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "attach_loss": "recipe_utils.losses.attach",
        "build_loss": "recipe_utils.losses.attach",
        "LinearCrossEntropyLoss": "recipe_utils.losses.cross_entropy",
        "LinearLogProbs": "recipe_utils.losses.log_probs",
    }
)
