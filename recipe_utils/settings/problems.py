"""Problems of a config by key."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_UNSET: Any = object()
_LIBRARIES = ("torch", "torchtune", "torchao", "transformers")


@dataclass(frozen=True)
class Problem:
    """Problem of a config; its string is ``key=value: text``.

    Attributes:
        key: config key, dotted for an argument of a component (``optimizer.lr``).
        text: the problem and its solution.
        value: value of the key, shown if given.
    """

    key: str
    text: str
    value: Any = _UNSET

    @property
    def root(self) -> str:
        """Key in the config without arguments, indices and value."""
        return self.key.replace("[", ".").replace("=", ".").partition(".")[0]

    def __str__(self) -> str:
        shown = "" if self.value is _UNSET else f"={self.value}"
        return f"{self.key}{shown}: {self.text}"


class ConfigError(ValueError):
    """Error with all problems of a config, one per line."""

    def __init__(self, *problems: Problem | str) -> None:
        parsed = (Problem(p.partition(": ")[0], p.partition(": ")[2]) if isinstance(p, str) else p for p in problems)
        self.problems: tuple[Problem, ...] = tuple(parsed)
        noun = "problem" if len(problems) == 1 else "problems"
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"{len(problems)} {noun} in the config:{lines}")


def problems_with_folder(key: str, folder: Path) -> Iterator[Problem]:
    """Yields a problem if a folder, or the nearest one that exists above it, is not writable."""
    try:
        for nearest in (folder, *folder.parents):
            with suppress(FileNotFoundError):  # other errors are of paths that cannot be created, as one below a file
                nearest.stat()
                break
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except (OSError, ValueError) as error:
        reason = os.strerror(getattr(error, "errno", 0) or 0)
        yield Problem(key, f"it cannot be written to ({reason}); set it to a directory of yours", folder)


@contextmanager
def naming(key: str = "") -> Iterator[None]:
    """Converts ValueError and OSError to a problem of ``key``; adds a note to other exceptions.

    Without a key, the error message must start with one.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        text, cause = str(error), str(error.__cause__ or "")
        text += f" ({cause})" if cause and cause not in text else ""
        named, separator, rest = text.partition(": ")
        problem = Problem(named, rest)
        if not separator or key not in ("", problem.root):  # it may name an argument of ``key``
            problem = Problem(key, text)
        raise ConfigError(problem) from error
    except Exception as error:
        if not key:
            raise
        # PyTorch or torchtune may have rejected values of the config, without a user's code in between.
        frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
        packages = [package for name in frames if (package := name.partition(".")[0])]
        packages = [package for package in packages if package not in sys.stdlib_module_names]
        if packages and packages[-1] in _LIBRARIES and {*packages} <= {*_LIBRARIES, "recipe_utils"}:
            raise ConfigError(Problem(key, f"{type(error).__name__}: {error}")) from error
        error.add_note(f"raised while {key} of the config was made")
        raise


def build(key: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns ``function(*args, **kwargs)``. Its errors are problems of ``key``, see :func:`naming`."""
    with naming(key):
        return function(*args, **kwargs)
