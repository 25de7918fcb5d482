"""Loaders of datasets: checks of their first samples, order, budget of rows."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.data.collators": "text_collator",
        "recipe_utils.data.dataset_weights": "mean_of_datasets problems_of_weights",
        "recipe_utils.data.loaders": "build_loader build_loaders load_datasets",
    }
)
