"""Types of config keys, and the keys of a settings class.

A settings class is a frozen pydantic dataclass. A field defines type, bounds and default of a config key; the docstring
below it is the description. A recipe's ``Settings`` inherits from other settings classes and adds further keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import ConfigDict, Field, Strict
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


def own_keys(settings_class: type) -> dict[str, FieldInfo]:
    """Returns the config keys that a settings class adds to those of its bases, with descriptions."""
    fields: dict[str, FieldInfo] = getattr(settings_class, "__pydantic_fields__", {})
    return {name: fields[name] for name in vars(settings_class).get("__annotations__", {}) if name in fields}


def keys_of(settings_class: type) -> dict[str, FieldInfo]:
    """Returns the config keys of a settings class, then those of its bases."""
    keys: dict[str, FieldInfo] = {}
    for part in settings_class.__mro__:
        keys |= {key: spec for key, spec in own_keys(part).items() if key not in keys}
    return keys


def alternatives_of(spec: FieldInfo) -> list[Any]:
    """Returns the members of a key's union type, or the type itself."""
    annotation = spec.annotation
    if get_origin(annotation) in (Union, UnionType):
        return list(get_args(annotation))
    bounds = [mark for mark in spec.metadata if not isinstance(mark, OnlyWith)]
    return [Annotated[annotation, *bounds] if bounds else annotation]


def metadata_of(spec: FieldInfo, kind: type[T]) -> Iterator[T]:
    """Returns metadata of type ``kind`` of a key, its alternatives and items of its lists."""
    parts = get_args(spec.annotation)
    annotations = [annotation for part in parts for annotation in (part, *get_args(part))]
    marks = [*spec.metadata, *(mark for each in annotations for mark in getattr(each, "__metadata__", ()))]
    return (mark for mark in marks if isinstance(mark, kind))
