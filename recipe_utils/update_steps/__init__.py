"""Update steps: the data of one optimizer step, decided on the CPU before its first forward."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.update_steps.loader": "RowBudget UpdateStepLoader",
        "recipe_utils.update_steps.objective": "declared_by",
        "recipe_utils.update_steps.order": "ShuffledOrder",
        "recipe_utils.update_steps.samples": "CheckedDataset",
        "recipe_utils.update_steps.settings": "DataSettings",
        "recipe_utils.update_steps.step": "mark_last Microbatch UpdateStep",
    }
)
