"""Loaders of datasets: checks of their first samples, order, budget of rows."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "build_loader": "recipe_utils.data.loaders",
        "build_loaders": "recipe_utils.data.loaders",
        "load_datasets": "recipe_utils.data.loaders",
        "mean_of_datasets": "recipe_utils.data.dataset_weights",
        "problems_of_weights": "recipe_utils.data.dataset_weights",
        "text_collator": "recipe_utils.data.collators",
    }
)
