"""Shows the samples of a config: ``python -m recipe_utils.show_data``."""
