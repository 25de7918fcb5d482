"""Functions that the update-step recipes call, in a package by subject.

The config keys of a package are beside the code that reads them, as settings classes. This file
imports nothing: PyTorch's start-up calls :mod:`recipe_utils.tune.registry` if torchtune is imported.
"""

__version__ = "0.5.0"


def check_version(written_for: str, recipe: str) -> None:
    """Raises RuntimeError if a recipe was written for another ``major.minor`` of this package."""
    if __version__.rsplit(".", 1)[0] != written_for:
        raise RuntimeError(
            f"{recipe} was written for recipe_utils {written_for}, and this is {__version__}. "
            f"CHANGELOG.md lists the changes; `tune cp {recipe} NEW.py` copies the current recipe"
        )
