"""Recipe files and configs of commands that train nothing."""

import argparse

from recipe_utils.cli.registry import RECIPES, config_path, recipe_path


def parser_of(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the arguments ``recipe`` and ``--config``."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="registered name or path")
    parser.add_argument("--config", required=True, help="registered name or path")
    return parser


def paths_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> tuple[str, str]:
    """Returns the paths of a recipe and a config; ends with an error if there is no such recipe."""
    recipe = recipe_path(given.recipe)
    if not recipe.is_file():
        parser.error(f"{recipe}: no recipe of this name or path; there are {', '.join(RECIPES)}")
    return str(recipe), str(config_path(given.config))
