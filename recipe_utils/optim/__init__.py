"""Optimizers, gradient norms and non-finite gradients."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "AdamW8bit": "recipe_utils.optim.adamw_8bit",
        "build_lr_scheduler": "recipe_utils.optim.optimizer",
        "build_optimizer": "recipe_utils.optim.optimizer",
        "check_optimizer": "recipe_utils.optim.optimizer",
        "clip_grad_norm_": "recipe_utils.optim.grad_norm",
        "grad_norms": "recipe_utils.optim.grad_norm",
        "NonfiniteGuard": "recipe_utils.optim.nonfinite",
        "OptimizerSettings": "recipe_utils.optim.optimizer",
        "Split": "recipe_utils.optim.split",
    }
)
