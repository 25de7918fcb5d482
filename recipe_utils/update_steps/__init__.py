"""Update steps: the data of one optimizer step, decided on the CPU before its first forward."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "CheckedDataset": "recipe_utils.update_steps.samples",
        "DataSettings": "recipe_utils.update_steps.settings",
        "declared_by": "recipe_utils.update_steps.objective",
        "mark_last": "recipe_utils.update_steps.step",
        "Microbatch": "recipe_utils.update_steps.step",
        "RowBudget": "recipe_utils.update_steps.loader",
        "ShuffledOrder": "recipe_utils.update_steps.order",
        "UpdateStep": "recipe_utils.update_steps.step",
        "UpdateStepLoader": "recipe_utils.update_steps.loader",
    }
)
