"""Types of config keys, and the keys of a settings class.

A settings class is a frozen pydantic dataclass. A field defines type, bounds and default of a config key; the docstring
below it is the description. A field whose type is a settings class is a group: in the config its keys stand beside the
others. So ``batch_size: 4`` of a YAML is ``settings.data.batch_size`` if ``Settings`` has ``data: DataSettings``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

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
            entries = other if isinstance(other, list) else [other]
            return any(isinstance(entry, dict) and entry.get(self.argument) for entry in entries)
        return other in self.values if self.values else other not in (None, False)

    @property
    def solution(self) -> str:
        """Returns the values of the other key to set."""
        if self.above is not None:
            return f"more than {self.above}"
        return " or ".join(map(str, self.values)) or "a value"


def groups_of(settings_class: Any) -> dict[str, Any]:
    """Returns the groups of a settings class by name: fields that are settings classes."""
    fields: dict[str, FieldInfo] = settings_class.__pydantic_fields__
    return {name: spec.annotation for name, spec in fields.items() if is_pydantic_dataclass(spec.annotation)}  # type: ignore[arg-type]


def own_keys(settings_class: Any) -> dict[str, FieldInfo]:
    """Returns the config keys of a settings class without those of its groups, with descriptions."""
    fields: dict[str, FieldInfo] = settings_class.__pydantic_fields__
    return {key: spec for key, spec in fields.items() if key not in groups_of(settings_class)}


def keys_of(settings_class: type) -> dict[str, FieldInfo]:
    """Returns the config keys of a settings class, then those of its groups."""
    keys = own_keys(settings_class)
    for group in groups_of(settings_class).values():
        keys |= keys_of(group)
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
