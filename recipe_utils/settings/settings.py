"""From the flat YAML of a config to frozen dataclasses, one for each room that its keys belong to.

A room's dataclass stands beside the code that takes it. Its fields are config keys: type, bounds and
default are the field's, the meaning is the text below it. A recipe's ``Settings`` lists the rooms that
it uses and adds keys of its own, the components among them. :func:`read_settings` deals a config out to
them and raises everything that is wrong with it at once.

    python -m recipe_utils.settings full_finetune_update_step    # all keys of a recipe, as a table
"""

import difflib
import os
import re
import runpy
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from recipe_utils.settings.components import MadeWith, check_component
from recipe_utils.settings.problems import ConfigError as ConfigError
from recipe_utils.settings.problems import Problem
from recipe_utils.settings.problems import naming as naming

T = TypeVar("T")

ROOM = ConfigDict(strict=True, use_attribute_docstrings=True)
"""How pydantic checks a room's dataclass: a type is meant as it stands, ``"False"`` is no bool."""

_MOST = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=_MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[float, Field(gt=0)]

_NAMES_A_PATH = re.compile(r"(dir|path|file|folder|checkpoint)s?$")

AS_WRITTEN = object()
"""Marks a mapping whose ``${...}`` refer to keys of a config that it will be a part of."""


# ---- Reading ------------------------------------------------------------------------------------


def read_settings(cfg: DictConfig, settings_class: type[T]) -> T:
    """Makes a recipe's settings from its config.

    A class may have a method ``problems()`` that yields what is wrong between its keys; it is called
    once each of them is right by itself. A key of the user's own is fine where another value refers to
    it as ``${key}``.

    Args:
        cfg: the config; ``null`` is a value like any other. It is changed: ``~`` in front of a path
            becomes the home directory.
        settings_class: a pydantic dataclass. Its fields are rooms (such dataclasses themselves) or keys.

    Raises:
        ConfigError: every unknown key, with the one that was probably meant, every missing one, every
            value of another type or out of bounds, every component whose arguments are not those of its
            signature, and everything that the classes' ``problems()`` say.
    """
    _drop_null_components(cfg)
    _expand_home(cfg)
    values, problems = _check_keys(cfg, settings_class)
    bad = {key for text in problems for key in re.findall(r"^[\w-]+", text)}
    rooms: dict[type, Any] = {}
    for room in rooms_of(settings_class):
        if room is not settings_class:
            rooms[room] = _read_room(room, values, bad, problems)
    settings = _read_room(settings_class, values, bad, problems, rooms)

    for instance in [*rooms.values(), settings]:
        for text in getattr(instance, "problems", tuple)() if instance is not None else ():
            # What a wrong value leads to elsewhere is no problem of its own.
            if not any(re.search(rf"(?<![\w.]){key}(?!\w)", text) for key in bad):
                problems.append(text)
    if problems:
        raise ConfigError(*problems)
    assert settings is not None
    return settings


def _drop_null_components(cfg: DictConfig) -> None:
    """Sets to null what ``KEY=null`` on torchtune's command line has left a component without a name."""
    parts: Any = OmegaConf.to_container(cfg, resolve=False)
    for key, part in parts.items():
        if isinstance(part, dict) and part.get("_component_", "") is None:
            cfg[key] = None


def _expand_home(cfg: DictConfig) -> None:
    """Puts the home directory where a path begins with ``~``: in a YAML no shell does, of ``KEY=~/x`` not all.

    Paths are told by their keys, at any depth, and what a path begins with as ``${key}`` is one.
    """
    parts: Any = OmegaConf.to_container(cfg, resolve=False)
    paths = list(_paths_in(cfg, parts))
    for *_, path in list(paths):
        if (begin := re.match(r"\$\{(\w+)\}", path)) and isinstance(parts.get(begin[1]), str):
            paths.append((cfg, begin[1], parts[begin[1]]))
    for config, key, path in paths:
        if path.startswith("~"):
            config[key] = os.path.expanduser(path)


def _paths_in(config: Any, parts: Any, are_paths: bool = False) -> Iterator[tuple[Any, Any, str]]:
    """(config that it is in, key, path as written) of everything whose key, or one around it, names a path."""
    for key, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
        is_path = are_paths or bool(_NAMES_A_PATH.search(str(key)))
        if isinstance(part, dict | list):
            yield from _paths_in(config[key], part, is_path)
        elif is_path and isinstance(part, str):
            yield config, key, part


def check_keys(cfg: DictConfig, settings_class: type) -> list[str]:
    """What is wrong with the names of a config's keys and with its components, whatever other values are.

    Args:
        cfg: see :func:`read_settings`.
        settings_class: likewise.
    """
    return _check_keys(cfg, settings_class)[1]


def _check_keys(cfg: DictConfig, settings_class: type) -> tuple[dict[str, Any], list[str]]:
    """The resolved values by key, and the problems."""
    problems: list[str] = []
    known = all_keys_of(settings_class)
    values = _resolve(cfg, known, problems)
    _check_names(OmegaConf.to_container(cfg, resolve=False), known, problems)
    for key, spec in known.items():
        made_with = next((m for m in _metadata(spec) if isinstance(m, MadeWith)), None)
        if made_with is not None and key in values:
            problems += check_component(key, values[key], made_with)
    return values, problems


def _resolve(
    cfg: DictConfig, known: Mapping[str, FieldInfo], problems: list[str]
) -> dict[str, Any]:
    values = {}
    for key in map(str, cfg):
        try:
            value = cfg[key]
            if OmegaConf.is_config(value):
                is_resolved = key not in known or AS_WRITTEN not in _metadata(known[key])
                value = OmegaConf.to_container(value, resolve=is_resolved)
            values[key] = value
        except OmegaConfBaseException as error:
            problems.append(f"{key}: {str(error).splitlines()[0]}")
    return values


def _check_names(given: Any, known: Mapping[str, FieldInfo], problems: list[str]) -> None:
    referred = set(re.findall(r"\$\{\s*([\w-]+)", str(given)))
    for key in given:
        if key not in known and key not in referred:
            similar = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "take it out"
            problems.append(f"{key}: this recipe has no such key; {hint}")
    for key, spec in known.items():
        is_component = any(isinstance(m, MadeWith) for m in _metadata(spec))
        if spec.is_required() and given.get(key) is None:
            what = "a component (_component_: ...)" if is_component else _describe(spec)
            problems.append(f"{key}: it is missing; set it to {what}")


def _read_room(
    room: type[T],
    values: Mapping[str, Any],
    bad: set[str],
    problems: list[str],
    rooms: Mapping[type, Any] | None = None,
) -> T | None:
    """A room of the values that are right and the defaults of the others, to find further problems."""
    hints = get_type_hints(room)
    of_rooms = {name: rooms[hints[name]] for name in hints if hints[name] in rooms} if rooms else {}
    specs = keys_of(room)
    good = {key: values[key] for key in specs if key in values and key not in bad}
    if any(instance is None for instance in of_rooms.values()):
        return None
    for _ in range(2):
        if any(spec.is_required() and key not in good for key, spec in specs.items()):
            good |= {key: values.get(key) for key in specs if specs[key].is_required()}
        try:
            return room(**good, **of_rooms)
        except ValidationError as error:
            for found in error.errors():
                key = str(found["loc"][0])
                if key not in bad:
                    bad.add(key)
                    problems.append(_explain(key, good[key], specs[key], found.get("ctx", {})))
                good.pop(key, None)
            if any(specs[key].is_required() for key in bad & specs.keys()):
                return None
    return None


def _explain(key: str, value: Any, spec: FieldInfo, bounds: Mapping[str, Any]) -> str:
    """What is wrong with a value, and what to set instead."""
    shown = str(value) if len(str(value)) < 50 else f"{str(value)[:40]}..."
    options = [
        a for part in _alternatives(spec) for a in get_args(part) if get_origin(part) is Literal
    ]
    wanted = _describe(spec).replace("bool", "True or False")
    for name, words in (("ge", "at least"), ("gt", "above"), ("le", "at most")):
        if name in bounds:
            wanted = f"{words} {bounds[name]}".removesuffix(".0")
    if options and isinstance(value, str):
        return f"{key}={shown}: unknown; set it to one of {', '.join(map(str, options))}"
    if value is None:
        return f"{key}=null: it must be {wanted}; leave it out for {spec.default}"
    if isinstance(value, str):
        shown = repr(value)  # 'False' and '3' are strings here
    return f"{key}={shown}: it must be {wanted}"


# ---- What a class asks for ------------------------------------------------------------------------


def rooms_of(settings_class: type) -> list[type]:
    """The rooms of a recipe's settings, and the class itself, in the order of its fields."""
    hints = get_type_hints(settings_class)
    return [*filter(_is_room, hints.values()), settings_class]


def keys_of(room: type) -> dict[str, FieldInfo]:
    """The config keys of one class, with type, bounds, default and meaning."""
    specs: dict[str, FieldInfo] = room.__pydantic_fields__  # type: ignore[attr-defined]
    return {key: spec for key, spec in specs.items() if not _is_room(spec.annotation)}


def all_keys_of(settings_class: type) -> dict[str, FieldInfo]:
    """The config keys of a recipe: those of its rooms, and its own."""
    return {key: spec for room in rooms_of(settings_class) for key, spec in keys_of(room).items()}


def _is_room(annotation: Any) -> bool:
    return isinstance(annotation, type) and hasattr(annotation, "__pydantic_fields__")


def _metadata(spec: FieldInfo) -> list[Any]:
    """Of the field and of all its alternatives."""
    found = list(spec.metadata)
    for part in _alternatives(spec):
        found += getattr(part, "__metadata__", ())
        for inner in get_args(part):
            found += getattr(inner, "__metadata__", ())
    return found


def _alternatives(spec: FieldInfo) -> list[Any]:
    annotation = spec.annotation
    if get_origin(annotation) in (Union, UnionType):
        return list(get_args(annotation))
    return [Annotated[annotation, *spec.metadata] if spec.metadata else annotation]


def _describe(spec: FieldInfo) -> str:
    """A field's type in words, such as ``int >= 1 or null``."""
    return " or ".join(_describe_type(part) for part in _alternatives(spec))


def _describe_type(annotation: Any) -> str:
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
        return " ".join([_describe_type(inner), *bounds])
    if get_origin(annotation) is dict:
        return "mapping"
    if get_origin(annotation) is list:
        return f"list of {_describe_type(*get_args(annotation))}"
    return getattr(annotation, "__name__", str(annotation))


def key_table(settings_class: type) -> str:
    """All keys of a recipe as a markdown table: key, type, default, meaning."""
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    *rooms, own = rooms_of(settings_class)
    for room in [own, *rooms]:
        for key, spec in keys_of(room).items():
            default = (
                "required"
                if spec.is_required()
                else "null"
                if spec.default is None
                else spec.default
            )
            meaning = " ".join((spec.description or "").split()).replace("``", "`")
            lines.append(f"| `{key}` | {_describe(spec)} | {default} | {meaning} |")
    return "\n".join(lines)


# ---- Making components ----------------------------------------------------------------------------


def make_all(**makers: Callable[[], Any]) -> tuple[Any, ...]:
    """Calls each maker of a component and returns what they made, in their order.

    Args:
        makers: by the component's key.

    Raises:
        ConfigError: each ValueError and OSError of a maker, by its key. Anything else is a mistake in
            the component and keeps its traceback, with a note of the key.
    """
    made: list[Any] = []
    problems: list[Problem | str] = []
    for key, make in makers.items():
        try:
            with naming(key):
                made.append(make())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return tuple(made)


# ---- The command ------------------------------------------------------------------------------------


def settings_of(recipe: str) -> type:
    """The ``Settings`` of a recipe.

    Args:
        recipe: a registered name, or the path of a file.

    Raises:
        ValueError: there is no such recipe, or it has no ``Settings``.
    """
    from recipe_utils.tune.registry import RECIPES, recipe_path

    path = str(recipe_path(recipe)) if recipe in RECIPES else recipe
    if not os.path.isfile(path):
        raise ValueError(
            f"{recipe}: no recipe of this name or path; there are {', '.join(RECIPES)}"
        )
    found = runpy.run_path(path).get("Settings")
    if not _is_room(found):
        raise ValueError(f"{recipe}: it has no Settings")
    assert isinstance(found, type)
    return found
