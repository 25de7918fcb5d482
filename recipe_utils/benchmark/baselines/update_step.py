"""Update-step recipes as baselines, without checkpoints."""

from typing import Any

from omegaconf import DictConfig

from recipe_utils.settings.describe import load_recipe


def make_recipe(name_or_path: str, config: DictConfig) -> Any:
    """Returns an update-step recipe that exports nothing."""
    recipe = load_recipe(name_or_path)[1](config)
    recipe.run.export = do_nothing
    return recipe


def train(config: DictConfig, name_or_path: str) -> None:
    """Trains with an update-step recipe that saves nothing."""
    recipe = make_recipe(name_or_path, config)
    recipe.run.save = do_nothing
    with recipe.run:
        recipe.setup(config)
        recipe.train()


def do_nothing(*_: Any, **__: Any) -> None:
    """Replaces exports, checkpoints and statistics."""
