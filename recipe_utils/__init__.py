"""Functions that the update-step recipes call, in a package by subject.

The config keys of a package are beside the code that reads them, as settings classes. This file
imports nothing of the project: PyTorch's start-up calls :mod:`recipe_utils.cli.registry` if torchtune is imported.
"""

import ast
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.7.0"


def end_at_sigint() -> None:
    """Lets Ctrl-C end this program at once, without a traceback of its imports, until a training listens to it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background commands ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the launcher blocks it for its ranks


if sys.argv[:1] == ["-m"] or "TORCHTUNE_UPDATE_STEP_RUN" in os.environ:  # python -m recipe_utils.NAME, or a rank
    end_at_sigint()


def exported(init: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a package's ``__getattr__`` and ``__dir__`` (PEP 562) for the names in the stub beside its file ``init``.

    The stub is the only table of what a package exports, so that files can move. Editors and type checkers read it, and
    this function does: ``from M import A as A`` is ``A`` of ``M``, ``b = A`` the same by another name. A module is
    imported when one of its names is first used.
    """
    places = dict[str, tuple[str, str]]()
    for node in ast.parse(Path(init).with_suffix(".pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            places |= {alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Assign):
            places[ast.unparse(node.targets[0])] = places[ast.unparse(node.value)]

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"no {name}; it exports {', '.join(places)}")
        module, attribute = places[name]
        return getattr(import_module(module), attribute)

    return get, lambda: [*places]


def check_version(written_for: str, recipe: str) -> None:
    """Raises RuntimeError if a recipe was written for another ``major.minor`` of this package."""
    if __version__.rsplit(".", 1)[0] != written_for:
        raise RuntimeError(
            f"{recipe} was written for recipe_utils {written_for}, and this is {__version__}. "
            f"CHANGELOG.md lists the changes; `tune cp {recipe} NEW.py` copies the current recipe"
        )
