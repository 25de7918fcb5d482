"""Components of a config, checked against their signatures before anything is made of them.

A component is a mapping with a dotted path at ``_component_`` and the arguments that it is called with.
"""

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

MOVED = {
    "recipe_utils.docstrings.docstring_dataset": "recipe_utils.embedded.stdlib_docs.docstring_dataset",
    "recipe_utils.docstrings.docstring_tokenizer": "recipe_utils.embedded.stdlib_docs.docstring_tokenizer",
    "recipe_utils.fresh_weights.fresh_llama_checkpointer": (
        "recipe_utils.embedded.fresh_weights.fresh_llama_checkpointer"
    ),
}
"""Where components that configs of 0.1 name are today."""


@dataclass(frozen=True)
class MadeWith:
    """Marks a key as a component, and says what the recipe adds to its arguments.

    Attributes:
        num_positional: arguments that come first.
        keywords: names of others.
        default: path of the component where the config names none.
    """

    num_positional: int = 0
    keywords: tuple[str, ...] = ()
    default: str | None = None


Component = Annotated[dict[str, Any], MadeWith()]
"""A component that gets no arguments but the config's."""


def component_at(path: str) -> Any:
    """What is at a dotted path.

    Raises:
        ValueError: nothing is; says where it is today if it has moved.
    """
    if path in MOVED:
        raise ValueError(f"it has moved; set it to {MOVED[path]}")
    try:
        return _get_component_from_path(path)
    except InstantiationError as error:
        lines = [line for line in str(error).splitlines() if line]
        raise ValueError(" ".join(lines)) from error


def check_component(key: str, value: Any, made_with: MadeWith) -> Iterator[str]:
    """Yields what is wrong with a component, by its key, without making it.

    Args:
        key: of the config.
        value: at the key; null is fine here.
        made_with: what the recipe adds.
    """
    if isinstance(value, list):
        for index, part in enumerate(value):
            yield from check_component(f"{key}[{index}]", part, made_with)
        if not value:
            yield f"{key}=[]: it is empty; set it to a component (_component_: ...)"
        return
    if value is None:
        return
    if not isinstance(value, dict) or not isinstance(
        value.get("_component_", made_with.default), str
    ):
        yield f"{key}={value}: it must be a component (_component_: ...)"
        return
    path = str(value.get("_component_", made_with.default))
    try:
        made = component_at(path)
    except ValueError as error:
        yield f"{key}._component_={path}: {error}"
        return
    if not callable(made):
        yield f"{key}._component_={path}: it is a {type(made).__name__}, which nothing is made of"
        return
    arguments = {name: argument for name, argument in value.items() if name != "_component_"}
    yield from _check_arguments(key, made, arguments, made_with)


def _check_arguments(
    key: str, made: Any, arguments: Mapping[str, Any], made_with: MadeWith
) -> Iterator[str]:
    try:
        parameters = dict(inspect.signature(made).parameters)
    except (TypeError, ValueError):  # some callables of C have no signature
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    by_name = {
        name: p
        for name, p in parameters.items()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL, p.POSITIONAL_ONLY)
    }
    from_recipe = [*list(parameters)[: made_with.num_positional], *made_with.keywords]
    hints = _hints(made)
    name_of_made = getattr(made, "__name__", str(made))
    for name, argument in arguments.items():
        if name not in by_name:
            if not takes_any:
                similar = difflib.get_close_matches(name, by_name.keys() - from_recipe, n=1)
                hint = f"did you mean {similar[0]}?" if similar else "take it out"
                yield f"{key}.{name}: {name_of_made} has no such argument; {hint}"
            continue
        hint = hints.get(name, Any)
        if argument != by_name[name].default and not fits(argument, hint):
            wanted = getattr(hint, "__name__", str(hint).replace("typing.", ""))
            if get_origin(hint) is not None:
                wanted = str(hint).replace("typing.", "")
            yield f"{key}.{name}={argument!r}: {name_of_made} takes {wanted}"
    for name, parameter in by_name.items():
        if parameter.default is parameter.empty and name not in {*arguments, *from_recipe}:
            yield f"{key}.{name}: it is missing; {name_of_made} needs it"


def _hints(made: Any) -> dict[str, Any]:
    try:
        return get_type_hints(vars(made)["__init__"] if isinstance(made, type) else made)
    except Exception:  # annotations may name what only a type checker imports
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value as YAML gives it can be meant for a parameter with this annotation.

    Lists stand for tuples and other sequences, strings for paths and members of enumerations. True for
    annotations that say nothing about such values.
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint in (Any, object, inspect.Parameter.empty) or isinstance(hint, (str, TypeVar)):
        return True
    if origin in (Union, UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Annotated:
        return fits(value, args[0])
    if origin is Literal:
        return value in args
    if value is None:
        return hint is NoneType
    kind = origin or hint
    if not isinstance(kind, type) or (isinstance(value, dict) and "_component_" in value):
        return True
    if kind in (bool, str):
        return isinstance(value, kind)
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(
            value, bool
        )
    if issubclass(kind, Mapping):
        return isinstance(value, dict) and all(fits(v, args[1]) for v in value.values() if args)
    if issubclass(kind, tuple) and args and args[-1] is not Ellipsis:
        return isinstance(value, list) and len(value) == len(args) and all(map(fits, value, args))
    if isinstance(value, list):
        is_sequence = issubclass(list, kind) or issubclass(kind, (Sequence, set, frozenset))
        return is_sequence and all(fits(item, args[0]) for item in value if args)
    if issubclass(kind, (PathLike, Enum)):
        return isinstance(value, str)
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that cannot be asked
        return True
