"""Prints the config keys of all recipes, or of one: ``python -m recipe_utils.settings [RECIPE]``."""

import signal
import sys

from recipe_utils.cli.registry import TRAINING_RECIPES
from recipe_utils.settings.describe import key_page, settings_of


def main() -> None:
    """Prints the keys of the recipe given on the command line; without one, those of all."""
    if len(sys.argv) > 2 or (sys.argv[1:2] and sys.argv[1].startswith("-")):
        sys.exit("usage: python -m recipe_utils.settings [RECIPE]")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `| head`
    try:
        print(key_page({recipe: settings_of(recipe) for recipe in sys.argv[1:] or TRAINING_RECIPES}), end="")  # noqa: T201
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
