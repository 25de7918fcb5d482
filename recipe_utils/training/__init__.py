"""A training: loop, log, checkpoints."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.training.command": "entry_point",
        "recipe_utils.training.log": "Reported",
        "recipe_utils.training.parts.answers": "Answers",
        "recipe_utils.training.parts.budget": "StepMemory",
        "recipe_utils.training.parts.exports": "Exports",
        "recipe_utils.training.parts.sample_losses": "DatasetLosses problems_with_sample_losses SampleLosses",
        "recipe_utils.training.parts.validation": "sum_over Validation",
        "recipe_utils.training.resume": "Trained",
        "recipe_utils.training.run": "Run",
        "recipe_utils.training.settings": "problems_between RunSettings TextComponents",
    }
)
