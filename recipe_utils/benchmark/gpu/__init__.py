"""What only a GPU can show, in one command: ``python -m recipe_utils.benchmark.gpu``."""
