"""Functions that the update-step recipes call, in a package by subject.

The config keys of a package are beside the code that reads them, as settings classes. This file
imports nothing of the project: PyTorch's start-up calls :mod:`recipe_utils.cli.registry` if torchtune is imported.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__version__ = "0.6.0"


def end_at_sigint() -> None:
    """Lets Ctrl-C end this program at once, without a traceback of its imports, until a training listens to it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background commands ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the launcher blocks it for its ranks


if sys.argv[:1] == ["-m"] or "TORCHTUNE_UPDATE_STEP_RUN" in os.environ:  # python -m recipe_utils.NAME, or a rank
    end_at_sigint()


def exported(names_of_modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's ``__getattr__`` (PEP 562) for the names that configs and recipes use, so that files can move.

    Args:
        names_of_modules: module -> names, such as ``"Plan other=function"``, where ``other`` is its ``function``. A
            module is imported when one of its names is first used.
    """
    pairs = ((module, name.partition("=")) for module, names in names_of_modules.items() for name in names.split())
    places = {name: (module, attribute or name) for module, (name, _, attribute) in pairs}

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"no {name}; it exports {', '.join(places)}")
        module, attribute = places[name]
        return getattr(import_module(module), attribute)

    return get


def check_version(written_for: str, recipe: str) -> None:
    """Raises RuntimeError if a recipe was written for another ``major.minor`` of this package."""
    if __version__.rsplit(".", 1)[0] != written_for:
        raise RuntimeError(
            f"{recipe} was written for recipe_utils {written_for}, and this is {__version__}. "
            f"CHANGELOG.md lists the changes; `tune cp {recipe} NEW.py` copies the current recipe"
        )
