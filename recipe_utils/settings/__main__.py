"""Prints all keys of a recipe: ``python -m recipe_utils.settings RECIPE``."""

import signal
import sys

from recipe_utils.settings.describe import key_table, settings_of


def main() -> None:
    """Prints the keys of the recipe given on the command line."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m recipe_utils.settings RECIPE")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `| head`
    try:
        print(key_table(settings_of(sys.argv[1])))  # noqa: T201
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
