"""Reads and checks a flat YAML config as the settings classes of a recipe."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from recipe_utils.settings.components import (
    MadeWith,
    check_component,
    component_at,
    names_of_paths,
)
from recipe_utils.settings.describe import type_in_words
from recipe_utils.settings.keys import (
    AS_WRITTEN,
    STRICT,
    OnlyWith,
    all_keys_of,
    alternatives_of,
    keys_of,
    metadata_of,
    settings_classes_of,
)
from recipe_utils.settings.problems import ConfigError, Problem

T = TypeVar("T")


def read_settings(cfg: DictConfig, settings_class: type[T]) -> T:
    """Builds a recipe's settings from its config. Expands ``~`` in paths of ``cfg`` in place.

    Unknown keys are allowed if another value refers to them as ``${key}``. Problems that follow
    from a value that is wrong by itself are not reported.

    Raises:
        ConfigError: contains all unknown and missing keys, wrong types, values out of bounds,
            components that do not match their signatures, keys without effect, and the results of
            the classes' ``problems()``.
    """
    _drop_null_components(cfg)
    values, problems = check_keys(cfg, settings_class)
    known = all_keys_of(settings_class)
    wrong = {problem.root for problem in problems}
    of_values = {key: _check_value(key, values[key], known[key]) for key in known if key in values}
    invalid = {key: problem for key, problem in of_values.items() if problem is not None}
    problems += [problem for key, problem in invalid.items() if key not in wrong]
    wrong |= invalid.keys()

    # Defaults replace wrong values, so that other keys can be checked. Required components have
    # none: those with wrong arguments are kept, since their problem is reported already.
    required = {key for key, spec in known.items() if spec.is_required()}
    good = {
        key: value
        for key, value in values.items()
        if key not in wrong or key in required - invalid.keys()
    }
    parts: dict[type, Any] = {}
    for part in settings_classes_of(settings_class):
        hints = get_type_hints(part)
        arguments = {name: parts[hint] for name, hint in hints.items() if hint in parts}
        arguments |= {key: good[key] for key in keys_of(part) if key in good}
        with suppress(ValidationError):  # of a missing key, which is reported already
            parts[part] = part(**arguments)

    found = [*_without_effect(good, known)]
    for instance in parts.values():
        found += getattr(instance, "problems", tuple)()
    problems += [p for p in found if wrong.isdisjoint({p.root, *p.depends_on})]
    if problems:
        raise ConfigError(*problems)
    settings: T = parts[settings_class]
    return settings


def check_keys(cfg: DictConfig, settings_class: type) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the resolved values by key, and problems of key names and components only."""
    known = all_keys_of(settings_class)
    _expand_home(cfg, known)
    of_model = list(_set_defaults_of_model(cfg, known))
    values, problems = _resolve(cfg, known)
    problems += of_model
    problems += _check_names(OmegaConf.to_container(cfg, resolve=False), known)
    for key, spec in known.items():
        made_with = next(metadata_of(spec, MadeWith), None)
        if made_with is not None and key in values:
            problems += check_component(key, values[key], made_with)
    return values, problems


def _drop_null_components(cfg: DictConfig) -> None:
    """Sets components with a null ``_component_`` to null: torchtune parses ``KEY=null`` so."""
    parts: Any = OmegaConf.to_container(cfg, resolve=False)
    for key, part in parts.items():
        if isinstance(part, dict) and part.get("_component_", "") is None:
            cfg[key] = None


def _set_defaults_of_model(cfg: DictConfig, known: Mapping[str, FieldInfo]) -> Iterator[Problem]:
    """Sets keys that are missing and that the model's component has in ``recipe_defaults``."""
    try:
        arguments: Any = OmegaConf.to_container(cfg["model"], resolve=True)
        defaults = getattr(component_at(arguments.pop("_component_")), "recipe_defaults", {})
    except (OmegaConfBaseException, ValueError, TypeError, KeyError, AttributeError):
        return  # a problem of the model's own
    for key in (defaults.keys() & known) - cfg.keys():
        try:
            cfg[key] = defaults[key](**arguments)
        except Exception as error:  # any: transformers raises many classes for a wrong config.json
            text = str(error) or type(error).__name__
            yield Problem(key, f"the model chooses it, which cannot be built: {text}")


def _expand_home(cfg: DictConfig, known: Mapping[str, FieldInfo]) -> None:
    """Expands ``~`` in keys of type Path and in path arguments of components."""
    for key, spec in known.items():
        is_path = any(Path in (part, *get_args(part)) for part in alternatives_of(spec))
        if key in cfg and (is_path or any(metadata_of(spec, MadeWith))):
            _expand(cfg, key, is_path)


def _expand(parent: Any, key: Any, is_path: bool) -> None:
    """Expands a path and all values in it, or else only path arguments of components."""
    try:
        value = parent[key]
    except OmegaConfBaseException:  # reported by _resolve
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


def _resolve(
    cfg: DictConfig, known: Mapping[str, FieldInfo]
) -> tuple[dict[str, Any], list[Problem]]:
    values: dict[str, Any] = {}
    problems = []
    for key in map(str, cfg):
        try:
            value = cfg[key]
            if OmegaConf.is_config(value):
                is_resolved = key not in known or AS_WRITTEN not in metadata_of(known[key], object)
                value = OmegaConf.to_container(value, resolve=is_resolved)
            values[key] = value
        except OmegaConfBaseException as error:
            problems.append(Problem(key, str(error).splitlines()[0]))
    return values, problems


def _check_names(given: Any, known: Mapping[str, FieldInfo]) -> Iterator[Problem]:
    referred = set(re.findall(r"\$\{\s*([\w-]+)", str(given)))
    for key in map(str, given):
        if key not in known and key not in referred:
            similar = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "take it out"
            yield Problem(key, f"this recipe has no such key; {hint}")
    for key, spec in known.items():
        if spec.is_required() and given.get(key) is None:
            is_component = any(metadata_of(spec, MadeWith))
            what = "a component (_component_: ...)" if is_component else type_in_words(spec)
            yield Problem(key, f"it is missing; set it to {what}")


def _check_value(key: str, value: Any, spec: FieldInfo) -> Problem | None:
    """Returns a problem if a value does not match the type or bounds of its key."""
    annotation: Any = spec.annotation
    if spec.metadata:
        annotation = Annotated[annotation, *spec.metadata]
    try:
        TypeAdapter(annotation, config=STRICT).validate_python(value)
        return None
    except ValidationError as error:
        bounds: Mapping[str, Any] = error.errors()[0].get("ctx", {})
    shown = str(value) if len(str(value)) < 50 else f"{str(value)[:40]}..."
    literals = [part for part in alternatives_of(spec) if get_origin(part) is Literal]
    if literals and isinstance(value, str):
        options = ", ".join(str(option) for part in literals for option in get_args(part))
        return Problem(key, f"unknown; set it to one of {options}", shown)
    wanted = type_in_words(spec).replace("bool", "True or False")
    for name, words in (("ge", "at least"), ("gt", "above"), ("le", "at most")):
        if name in bounds:
            wanted = f"{words} {bounds[name]}".removesuffix(".0")
    if value is None:
        return Problem(key, f"it must be {wanted}; leave it out for {spec.default}", "null")
    # repr distinguishes the strings 'False' and '3' from values
    return Problem(key, f"it must be {wanted}", repr(value) if isinstance(value, str) else shown)


def _without_effect(good: Mapping[str, Any], known: Mapping[str, FieldInfo]) -> Iterator[Problem]:
    for key, spec in known.items():
        if good.get(key) in (None, spec.default):
            continue
        marks = [each for each in metadata_of(spec, OnlyWith) if each.key in known]
        others = [good.get(each.key, known[each.key].default) for each in marks]
        if not marks or any(map(OnlyWith.allows, marks, others)):
            continue
        needed, shown = marks[0], "null" if others[0] is None else others[0]
        yield Problem(
            key,
            f"it has no effect with {needed.key}={shown}; set {needed.key} to {needed.solution}, or remove this key",
            good[key],
            tuple(each.key for each in marks),
        )
