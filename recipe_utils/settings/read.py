"""Reads and checks a flat YAML config as the settings classes of a recipe."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from recipe_utils.settings.components import DEFAULTS_OF_MODELS, MadeWith, check_component, component_at, names_of_paths
from recipe_utils.settings.describe import type_in_words
from recipe_utils.settings.keys import AS_WRITTEN, OnlyWith, alternatives_of, groups_of, keys_of, metadata_of, own_keys
from recipe_utils.settings.problems import ConfigError, Problem

T = TypeVar("T")

_ROWS = (
    "here a row spans ranks only where it is too long for one; set it to 1, microbatching=packed, "
    "max_tokens_per_microbatch=<tokens that fit on one rank> and max_ranks_per_row=2 or more"
)
WITHOUT_EFFECT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "context_parallel_dim": ((1,), _ROWS),
    "low_cpu_ram": ((True, False), "take it out"),
    "memory_efficient_fsdp_wrap": ((False,), "it must be False"),
}
"""Keys of torchtune's configs that are no keys of a recipe -> values that are accepted without effect, and what to do
about any other."""


def read_settings(cfg: DictConfig, settings_class: type[T]) -> T:
    """Builds a recipe's settings from its config. Expands ``~`` in paths of ``cfg`` in place.

    Keys of groups (:func:`.groups_of`) stand beside the others. Unknown keys are allowed if another value refers to
    them as ``${key}``. Raises ConfigError with all unknown and missing keys, wrong types, values out of bounds, and
    components that do not match their signatures, and keys that a group names in ``unused``, with the reason; if there
    are none, with all keys without effect, and the results of ``problems()`` of groups, the last one first, and of the
    class.
    """
    parts: Any = OmegaConf.to_container(cfg, resolve=False)
    for key, part in parts.items():
        if isinstance(part, dict) and part.get("_component_", "") is None:
            cfg[key] = None  # torchtune parses ``KEY=null`` of a component so
    values, problems = check_keys(cfg, settings_class)
    known = keys_of(settings_class)
    problems += [
        Problem(key, f"{reason}; remove the key", values[key])
        for group in groups_of(settings_class).values()
        for key, reason in getattr(group, "unused", {}).items()
        if values.get(key) not in (None, False, known[key].default)
    ]
    errors = list[Any]()
    settings = _made(settings_class, values, errors)
    problems += _problems_of_values(errors, values, known, {p.root for p in problems})
    if not problems:
        problems = [*_without_effect(values, known), *_problems_between(settings)]
    if problems or settings is None:
        raise ConfigError(*problems)
    return settings


def _made(settings_class: type[T], values: Mapping[str, Any], errors: list[Any]) -> T | None:
    """Returns the settings of a class with those of its groups; None after adding pydantic's ``errors`` of values."""
    groups = groups_of(settings_class)
    made = {name: _made(group, values, errors) for name, group in reversed(groups.items())}
    try:
        return settings_class(**made, **{key: values[key] for key in own_keys(settings_class) if key in values})
    except ValidationError as error:
        errors += [details for details in error.errors() if details["loc"][0] not in groups]
        return None


def _problems_between(settings: object) -> Iterator[Problem]:
    """Yields the results of ``problems()`` of groups, the last one first, and of the settings."""
    for group in reversed(groups_of(type(settings))):
        yield from _problems_between(getattr(settings, group))
    if hasattr(settings, "problems"):
        yield from settings.problems()


def check_keys(cfg: DictConfig, settings_class: type) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the resolved values by key, and problems of key names and components only."""
    known = keys_of(settings_class)
    for key, spec in known.items():  # expands ~ in keys of type Path and in path arguments of components
        is_path = any(Path in (part, *get_args(part)) for part in alternatives_of(spec))
        if key in cfg and (is_path or any(metadata_of(spec, MadeWith))):
            _expand(cfg, key, is_path)
    of_model = list(_set_defaults_of_model(cfg, known))
    values, problems = dict[str, Any](), list[Problem]()
    for key in map(str, cfg):
        try:
            value = cfg[key]
            if OmegaConf.is_config(value):
                is_resolved = key not in known or AS_WRITTEN not in metadata_of(known[key], object)
                value = OmegaConf.to_container(value, resolve=is_resolved)
            values[key] = value
        except OmegaConfBaseException as error:
            problems.append(Problem(key, str(error).splitlines()[0]))
    problems += of_model
    problems += _check_names(OmegaConf.to_container(cfg, resolve=False), known)
    for key, spec in known.items():
        made_with = next(metadata_of(spec, MadeWith), None)
        if made_with is not None and key in values:
            problems += check_component(key, values[key], made_with)
    return values, problems


def _set_defaults_of_model(cfg: DictConfig, known: Mapping[str, FieldInfo]) -> Iterator[Problem]:
    """Sets keys that are missing and that the model's component has in :data:`.DEFAULTS_OF_MODELS`."""
    try:
        arguments: Any = OmegaConf.to_container(cfg["model"], resolve=True)
        defaults = DEFAULTS_OF_MODELS.get(component_at(arguments.pop("_component_")), {})
    except (OmegaConfBaseException, ValueError, TypeError, KeyError, AttributeError):
        return  # a problem of the model's own
    for key in (defaults.keys() & known) - cfg.keys():
        try:
            cfg[key] = defaults[key](**arguments)
        except Exception as error:  # any: transformers raises many classes for a wrong config.json
            text = str(error) or type(error).__name__
            yield Problem(*text.split(": ", 1)) if text.startswith("model.") else Problem("model", text)
            return  # one for all defaults


def _expand(parent: Any, key: Any, is_path: bool) -> None:
    """Expands a path and all values in it, or else only path arguments of components."""
    try:
        value = parent[key]
    except OmegaConfBaseException:  # reported by check_keys
        return
    if isinstance(value, str) and is_path and value.startswith("~"):
        parent[key] = os.path.expanduser(value)
    elif isinstance(value, ListConfig):
        for index in range(len(value)):
            _expand(value, index, is_path)
    elif isinstance(value, DictConfig):
        paths = names_of_paths(value)
        for name in list(value):
            _expand(value, name, is_path or name in paths)


def _check_names(given: Any, known: Mapping[str, FieldInfo]) -> Iterator[Problem]:
    referred = set(re.findall(r"\$\{\s*([\w-]+)", str(given)))
    for key, value in given.items():
        key = str(key)
        accepted, text = WITHOUT_EFFECT.get(key, ((value,), ""))
        if value not in accepted:
            yield Problem(key, text, value)
        elif key not in {*known, *WITHOUT_EFFECT, *referred}:
            similar = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "take it out"
            hint = "write it without the +" if key.startswith("+") else hint
            yield Problem(key, f"this recipe has no such key; {hint}")
    for key, spec in known.items():
        if spec.is_required() and given.get(key) is None:
            is_component = any(metadata_of(spec, MadeWith))
            what = "a component (_component_: ...)" if is_component else type_in_words(spec)
            yield Problem(key, f"it is missing; set it to {what}")


def _problems_of_values(
    errors: Sequence[Any], values: Mapping[str, Any], known: Mapping[str, FieldInfo], reported: set[str]
) -> Iterator[Problem]:
    """Yields the first problem of each value that does not match type or bounds of its key."""
    for details in errors:
        key, bounds = str(details["loc"][0]), details.get("ctx", {})
        if key in reported or details["type"] == "missing":  # by name already
            continue
        reported.add(key)
        value, spec = values[key], known[key]
        wanted = type_in_words(spec).replace("bool", "True or False")
        for name, words in (("ge", "at least"), ("gt", "above"), ("le", "at most")):
            if name in bounds:
                wanted = f"{words} {bounds[name]}".removesuffix(".0")
        shown = str(value) if len(str(value)) < 50 else f"{str(value)[:40]}..."
        literals = [part for part in alternatives_of(spec) if get_origin(part) is Literal]
        if literals and isinstance(value, str):
            options = ", ".join(str(option) for part in literals for option in get_args(part))
            yield Problem(key, f"unknown; set it to one of {options}", shown)
        elif value is None:
            yield Problem(key, f"it must be {wanted}; leave it out for {spec.default}", "null")
        else:  # repr distinguishes the strings 'False' and '3' from values
            yield Problem(key, f"it must be {wanted}", repr(value) if isinstance(value, str) else shown)


def _without_effect(values: Mapping[str, Any], known: Mapping[str, FieldInfo]) -> Iterator[Problem]:
    for key, spec in known.items():
        if values.get(key) in (None, spec.default):
            continue
        marks = [mark for mark in metadata_of(spec, OnlyWith) if mark.key in known]
        others = [values.get(mark.key, known[mark.key].default) for mark in marks]
        if not marks or any(map(OnlyWith.allows, marks, others)):
            continue
        needed, shown = marks[0], "null" if others[0] is None else others[0]
        if needed.argument is not None:
            text = f"it has no effect without {needed.key}.{needed.argument}; set that, or remove this key"
            yield Problem(key, text, values[key])
            continue
        yield Problem(
            key,
            f"it has no effect with {needed.key}={shown}; set {needed.key} to {needed.solution}, or remove this key",
            values[key],
        )
