"""Optimizers, gradient norms and non-finite gradients."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.optim.adamw_8bit": "AdamW8bit",
        "recipe_utils.optim.grad_norm": "clip_grad_norm_ grad_norms",
        "recipe_utils.optim.nonfinite": "NonfiniteGuard",
        "recipe_utils.optim.optimizer": "build_lr_scheduler build_optimizer check_optimizer OptimizerSettings",
        "recipe_utils.optim.split": "Split",
    }
)
