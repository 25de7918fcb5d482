"""Loaders of datasets: checks of their first samples, order, budget of rows."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "build_loader": "recipe_utils.data.loaders",
        "build_loaders": "recipe_utils.data.loaders",
        "load_datasets": "recipe_utils.data.loaders",
        "text_collator": "recipe_utils.data.collators",
    }
)
