"""Types of config keys, and the keys of a settings class.

A settings class is a frozen pydantic dataclass beside the code that takes it. Its fields are config keys: the field
has the type, the bounds and the default, the text below it is the description. A recipe's ``Settings`` has other
settings classes as fields, and keys of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, Strict
from pydantic.fields import FieldInfo

T = TypeVar("T")

STRICT = ConfigDict(strict=True, use_attribute_docstrings=True)
"""pydantic config of a settings class. Values are not converted: ``"False"`` is not a bool."""

_MOST = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=_MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[float, Field(gt=0)]
FilePath = Annotated[Path, Strict(False)]
"""A file or folder; ``~`` in front is the home directory."""

AS_WRITTEN = object()
"""Marks a mapping whose ``${...}`` refer to keys of the config that it becomes a part of."""


@dataclass(frozen=True)
class OnlyWith:
    """Marks a key that has an effect only with certain values of another key.

    A config that sets the key to anything but its default, without them, is refused.

    Attributes:
        key: the other key.
        values: of the other key; empty for any but null and False.
    """

    key: str
    values: tuple[Any, ...] = ()


def settings_classes_of(recipe_settings: type) -> list[type]:
    """The settings classes in a recipe's ``Settings``, in the order of its fields, and ``Settings`` itself."""
    return [*filter(is_settings_class, get_type_hints(recipe_settings).values()), recipe_settings]


def keys_of(settings_class: type) -> dict[str, FieldInfo]:
    """The config keys of one settings class."""
    specs: dict[str, FieldInfo] = settings_class.__pydantic_fields__  # type: ignore[attr-defined]
    return {key: spec for key, spec in specs.items() if not is_settings_class(spec.annotation)}


def all_keys_of(recipe_settings: type) -> dict[str, FieldInfo]:
    """The config keys of a recipe."""
    classes = settings_classes_of(recipe_settings)
    return {key: spec for part in classes for key, spec in keys_of(part).items()}


def is_settings_class(annotation: Any) -> bool:
    """True for pydantic dataclasses."""
    return isinstance(annotation, type) and hasattr(annotation, "__pydantic_fields__")


def alternatives_of(spec: FieldInfo) -> list[Any]:
    """The members of a key's union type; the type itself if it is no union."""
    annotation = spec.annotation
    if get_origin(annotation) in (Union, UnionType):
        return list(get_args(annotation))
    return [Annotated[annotation, *spec.metadata] if spec.metadata else annotation]


def metadata_of(spec: FieldInfo, kind: type[T]) -> Iterator[T]:
    """The metadata of one type of a key, of its alternatives and of the items of lists."""
    found = list(spec.metadata)
    for part in get_args(spec.annotation) or ():
        found += getattr(part, "__metadata__", ())
        for inner in get_args(part):
            found += getattr(inner, "__metadata__", ())
    return (metadata for metadata in found if isinstance(metadata, kind))
