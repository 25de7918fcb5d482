"""A training: loop, log, checkpoints."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "Answers": "recipe_utils.training.parts.answers",
        "DatasetLosses": "recipe_utils.training.parts.sample_losses",
        "entry_point": "recipe_utils.training.command",
        "Exports": "recipe_utils.training.parts.exports",
        "problems_between": "recipe_utils.training.settings",
        "problems_with_sample_losses": "recipe_utils.training.parts.sample_losses",
        "Reported": "recipe_utils.training.log",
        "Run": "recipe_utils.training.run",
        "RunSettings": "recipe_utils.training.settings",
        "SampleLosses": "recipe_utils.training.parts.sample_losses",
        "StepMemory": "recipe_utils.training.parts.budget",
        "sum_over": "recipe_utils.training.parts.validation",
        "TextComponents": "recipe_utils.training.settings",
        "Trained": "recipe_utils.training.resume",
        "Validation": "recipe_utils.training.parts.validation",
    }
)
