"""Functions that the update-step recipes call, in a package by subject.

The config keys of a package are beside the code that reads them, as settings classes. This file
imports nothing of the project: PyTorch's start-up calls :mod:`recipe_utils.cli.registry` if torchtune is imported.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__version__ = "0.6.0"


def exported(modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's ``__getattr__`` (PEP 562) for the names that configs and recipes use, so that files can move.

    Args:
        modules: name -> ``module`` or ``module:attribute``. A module is imported when its name is first used.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"no {name}; it exports {', '.join(modules)}")
        module, _, attribute = modules[name].partition(":")
        return getattr(import_module(module), attribute or name)

    return get


def check_version(written_for: str, recipe: str) -> None:
    """Raises RuntimeError if a recipe was written for another ``major.minor`` of this package."""
    if __version__.rsplit(".", 1)[0] != written_for:
        raise RuntimeError(
            f"{recipe} was written for recipe_utils {written_for}, and this is {__version__}. "
            f"CHANGELOG.md lists the changes; `tune cp {recipe} NEW.py` copies the current recipe"
        )
