"""Formats the config keys of a recipe as a table."""

import runpy
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from recipe_utils.settings.components import MadeWith
from recipe_utils.settings.keys import alternatives_of, keys_of


def load_recipe(recipe: str) -> tuple[type, Any]:
    """Returns the ``Settings`` of a recipe, given by registered name or path, and its class.

    The class is the only one in the file with ``setup`` and ``update``; else None. Raises ValueError if
    there is no such recipe, or it has no ``Settings``.
    """
    from recipe_utils.cli.registry import RECIPES, recipe_path

    if not (path := recipe_path(recipe)).is_file():
        raise ValueError(f"{recipe}: no recipe of this name or path; there are {', '.join(RECIPES)}")
    names_of_file = runpy.run_path(str(path))
    settings: Any = names_of_file.get("Settings")
    if not is_pydantic_dataclass(settings):
        raise ValueError(f"{recipe}: it has no Settings")
    defined = [value for value in names_of_file.values() if getattr(value, "__module__", 0) == "<run_path>"]
    classes = [value for value in defined if hasattr(value, "setup") and hasattr(value, "update")]
    return settings, classes[0] if len(classes) == 1 else None


def settings_of(recipe: str) -> type:
    """Returns the ``Settings`` of a recipe; see :func:`load_recipe`."""
    return load_recipe(recipe)[0]


def key_table(recipe_settings: type) -> str:
    """Returns a Markdown table of all keys of a recipe: key, type (also null if that is the default), default, meaning."""
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key, spec in keys_of(recipe_settings).items():
        default = "required" if spec.is_required() else "null" if spec.default is None else spec.default
        words = type_in_words(spec).removesuffix(" or null" if spec.default is None else "")
        meaning = " ".join((spec.description or "").split()).replace("``", "`")
        lines.append(f"| `{key}` | {words} | {default} | {meaning} |")
    return "\n".join(lines)


def type_in_words(spec: FieldInfo) -> str:
    """Returns a key's type in words, such as ``int >= 1 or null``."""
    return " or ".join(map(_in_words, alternatives_of(spec)))


def _in_words(annotation: Any) -> str:
    if annotation is NoneType:
        return "null"
    if get_origin(annotation) is Literal:
        return " or ".join(str(option) for option in get_args(annotation))
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        flat = [m for given in metadata for m in getattr(given, "metadata", [given])]
        if any(isinstance(m, MadeWith) for m in flat):
            return "component"
        bounds = [f"> {m.gt}" for m in flat if hasattr(m, "gt")]
        bounds += [f">= {m.ge}" for m in flat if hasattr(m, "ge")]
        return " ".join([_in_words(inner), *bounds])
    if get_origin(annotation) is dict:
        return "mapping"
    if get_origin(annotation) is list:
        return f"list of {_in_words(*get_args(annotation))}"
    return getattr(annotation, "__name__", str(annotation)).replace("Path", "path")
