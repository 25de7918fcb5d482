"""Types of config keys, and the keys of a settings class.

A settings class is a frozen pydantic dataclass. A field defines type, bounds and default of a
config key; the docstring below it is the description. A recipe's ``Settings`` contains other
settings classes and further keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, Strict
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

T = TypeVar("T")

STRICT = ConfigDict(strict=True, use_attribute_docstrings=True)
"""pydantic config of settings classes, without type conversion: ``"False"`` is not a bool."""

_MOST = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=_MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[float, Field(gt=0)]
FilePath = Annotated[Path, Strict(False)]
"""File or folder; a leading ``~`` is the home directory."""

AS_WRITTEN = object()
"""Mark of a mapping whose ``${...}`` are resolved later, in the config that it is merged into."""


@dataclass(frozen=True)
class OnlyWith:
    """Mark of a key that has an effect only with certain ``values`` of another key.

    Without them any value but the default is an error. Empty ``values``: any but null, False and 0;
    for counts, those above ``above``; for components, those with an ``argument``. Of several marks
    one suffices, and errors name the first.
    """

    key: str
    values: tuple[Any, ...] = ()
    above: int | None = None
    argument: str | None = None

    def allows(self, other: Any) -> bool:
        """Returns True if the key has an effect with the value of the other key."""
        if self.above is not None:
            return bool(other > self.above)
        if self.argument is not None:
            parts = other if isinstance(other, list) else [other]
            return any(isinstance(part, dict) and part.get(self.argument) for part in parts)
        return other in self.values if self.values else other not in (None, False)

    @property
    def solution(self) -> str:
        """Returns the values of the other key to set."""
        if self.above is not None:
            return f"more than {self.above}"
        return " or ".join(map(str, self.values)) or "a value"


def settings_classes_of(recipe_settings: type) -> list[type]:
    """Returns the settings classes in the fields of a recipe's ``Settings``, then ``Settings``."""
    return [
        *filter(is_pydantic_dataclass, get_type_hints(recipe_settings).values()),
        recipe_settings,
    ]


def keys_of(settings_class: type) -> dict[str, FieldInfo]:
    """Returns the config keys of one settings class."""
    specs: dict[str, Any] = settings_class.__pydantic_fields__  # type: ignore[attr-defined]
    return {key: spec for key, spec in specs.items() if not is_pydantic_dataclass(spec.annotation)}


def all_keys_of(recipe_settings: type) -> dict[str, FieldInfo]:
    """Returns the config keys of a recipe."""
    classes = settings_classes_of(recipe_settings)
    return {key: spec for part in classes for key, spec in keys_of(part).items()}


def alternatives_of(spec: FieldInfo) -> list[Any]:
    """Returns the members of a key's union type, or the type itself."""
    annotation = spec.annotation
    if get_origin(annotation) in (Union, UnionType):
        return list(get_args(annotation))
    bounds = [each for each in spec.metadata if not isinstance(each, OnlyWith)]
    return [Annotated[annotation, *bounds] if bounds else annotation]


def metadata_of(spec: FieldInfo, kind: type[T]) -> Iterator[T]:
    """Returns metadata of type ``kind`` of a key, its alternatives and items of its lists."""
    found = list(spec.metadata)
    for part in get_args(spec.annotation) or ():
        found += getattr(part, "__metadata__", ())
        for inner in get_args(part):
            found += getattr(inner, "__metadata__", ())
    return (metadata for metadata in found if isinstance(metadata, kind))
