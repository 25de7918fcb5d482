"""Update-step recipes as baselines, without checkpoints."""

from functools import partial
from typing import Any

from omegaconf import DictConfig

from recipe_utils.benchmark.baselines.kinds import DISTILLATION, PAIRS, TEXT
from recipe_utils.settings.describe import load_recipe


def make_recipe(name: str, config: DictConfig) -> Any:
    """Returns an update-step recipe that exports nothing."""
    recipe = load_recipe(name)[1](config)
    recipe.run.export = _do_nothing
    return recipe


def _train(name: str, config: DictConfig) -> None:
    recipe = make_recipe(name, config)
    recipe.run.save = _do_nothing
    with recipe.run:
        recipe.setup(config)
        recipe.train()


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


train_text = partial(_train, TEXT)
train_dpo = partial(_train, PAIRS)
train_distillation = partial(_train, DISTILLATION)
