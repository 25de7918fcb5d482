"""Checks components of a config against their signatures before they are built.

A component is a mapping with a dotted path at ``_component_`` and the arguments of the call.
"""

import difflib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from recipe_utils.settings.problems import Problem

PATHS = {
    "adapter_checkpoint", "cache_dir", "checkpoint_dir", "checkpoint_files", "data_dir",
    "data_files", "generation_config_path", "image_dir", "log_dir", "merges_file", "merges_path",
    "output_dir", "path", "recipe_checkpoint", "special_tokens_path", "tokenizer_config_json_path",
    "tokenizer_json_path", "vocab_path",
}  # fmt: skip
"""Path arguments that torchtune or datasets annotate as ``str``."""


@dataclass(frozen=True)
class MadeWith:
    """Mark of a component key, with the positional and keyword arguments that the recipe adds.

    The component must take the first keyword, and is given the others if it takes them. ``default`` is the path of
    the component if the config has no ``_component_``.
    """

    num_positional: int = 0
    keywords: tuple[str, ...] = ()
    default: str | None = None


ENTRY_KEYS = ("name", "weight", "loss_weight")
"""Keys of an entry in a list of datasets that are not arguments of its component."""

Component = Annotated[dict[str, Any], MadeWith()]
"""Component to which the recipe adds no arguments."""


DEFAULTS_OF_MODELS: dict[Callable[..., Any], Mapping[str, Callable[..., Any]]] = {}
"""Component of a model -> defaults of a recipe's keys, each made from the component's arguments."""


_REMEDIES = {
    "transformers": "it needs transformers; pip install -e '.[hf]'",
    "bitsandbytes": "pip install bitsandbytes, or set it to recipe_utils.optim.AdamW8bit",
}
"""Remedies for packages that are not installed."""


def component_at(path: str) -> Any:
    """Returns the object at a dotted path; raises ValueError if there is none."""
    try:
        return _get_component_from_path(path)
    except (InstantiationError, ModuleNotFoundError) as error:
        # Our packages import a module when one of its names is first used; torchtune does not convert that error.
        package = getattr(error, "name", None) or getattr(error.__cause__, "name", None)
        text = _REMEDIES.get(package or "", " ".join(line for line in str(error).splitlines() if line))
        raise ValueError(text) from error


def split_entry(entry: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Returns the component in a list of datasets, and the :data:`ENTRY_KEYS` that it does not take.

    ``subset`` becomes the ``name`` of a component that passes further arguments to ``datasets``.
    """
    takes = _parameters_of(entry)
    if takes is None:  # reported by check_component
        return dict(entry), {}
    entry_keys = {key: value for key, value in entry.items() if key in ENTRY_KEYS and key not in takes}
    component = {key: value for key, value in entry.items() if key not in entry_keys}
    if _passes_on(takes) and "subset" in component.keys() - takes.keys():
        component["name"] = component.pop("subset")
    return component, entry_keys


def may_mean_subset(entry: Mapping[Any, Any]) -> bool:
    """Returns True if torchtune would take an entry's ``name`` for a subset of a hub's dataset."""
    is_unclear = entry.keys() & {"name", "subset", "data_files"} == {"name"}
    return is_unclear and "name" in split_entry(entry)[1] and _passes_on(_parameters_of(entry) or {})


def taken_by(component: Mapping[Any, Any], arguments: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns those of ``arguments`` that a component takes, all if it has no signature."""
    takes = _parameters_of(component)
    return {k: value for k, value in arguments.items() if takes is None or k in takes or _passes_on(takes)}


def _parameters_of(component: Mapping[Any, Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(component_at(str(component.get("_component_")))).parameters
    except (ValueError, TypeError):
        return None


def _passes_on(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def names_of_paths(component: Mapping[Any, Any]) -> set[str]:
    """Returns the names of a component's arguments that are paths."""
    try:
        hints = _hints(component_at(str(component.get("_component_"))))
    except ValueError:
        hints = {}
    return {name for name in component if name in PATHS or _allows_path(hints.get(name))}


def _allows_path(hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if isinstance(kind, type) and issubclass(kind, PathLike):
        return True
    return any(map(_allows_path, get_args(hint)))


def check_component(key: str, value: Any, made_with: MadeWith) -> Iterator[Problem]:
    """Yields the problems of a component, a list of components or null, without building them."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            entry = split_entry(entry)[0] if isinstance(entry, dict) else entry
            yield from check_component(f"{key}.{index}", entry, made_with)
        if not value:
            yield Problem(key, "it is empty; set it to a component (_component_: ...)", value)
        return
    if value is None:
        return
    path = value.get("_component_", made_with.default) if isinstance(value, dict) else None
    if not isinstance(path, str):
        text = f"it must be a component (_component_: ...); set {key}._component_ to its path"
        if "_component_:" in str(value):
            text = "YAML needs a space after each colon; write {_component_: ..., ...}"
        yield Problem(key, text, value)
        return
    # It is imported and not called: a call could load weights.
    try:
        made = component_at(path)
        if not callable(made):
            raise ValueError(f"it is a {type(made).__name__}, which cannot be called")
    except ValueError as error:
        yield Problem(f"{key}._component_", str(error), path)
        return
    arguments = {name: argument for name, argument in value.items() if name != "_component_"}
    yield from _check_arguments(key, made, arguments, made_with)


def _check_arguments(key: str, made: Any, arguments: Mapping[str, Any], made_with: MadeWith) -> Iterator[Problem]:
    try:
        parameters = inspect.signature(made).parameters
    except (TypeError, ValueError):  # some C callables have no signature
        return
    kinds = {p.kind for p in parameters.values()}
    by_name = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    from_recipe = [*list(parameters)[: made_with.num_positional], *made_with.keywords]
    hints = _hints(made)
    name_of_made = getattr(made, "__name__", str(made))
    # Given arguments first, by name and then by type; then those that are missing.
    for name, argument in arguments.items():
        hint = hints.get(name, Any)
        if name not in by_name and inspect.Parameter.VAR_KEYWORD not in kinds:
            similar = difflib.get_close_matches(name, by_name.keys() - from_recipe, n=1)
            solution = f"did you mean {similar[0]}?" if similar else "take it out"
            # A class may have a reason for the lack of an argument that others have.
            text = getattr(made, "refused", {}).get(name, f"{name_of_made} has no such argument")
            yield Problem(f"{key}.{name}", f"{text}; {solution}")
        elif name == "checkpoint_files" and argument == []:
            yield Problem(f"{key}.{name}", "it is empty; list the files of the weights", argument)
        elif name in made_with.keywords:
            yield Problem(f"{key}.{name}", "the recipe sets it; take it out", argument)
        elif name in by_name and argument != by_name[name].default and not fits(argument, hint):
            wanted = str(hint).replace("typing.", "")
            if get_origin(hint) is None:
                wanted = getattr(hint, "__name__", wanted)
            yield Problem(f"{key}.{name}", f"{name_of_made} takes {wanted}", repr(argument))
    lacking = ", ".join(name for name in made_with.keywords[:1] if name not in by_name)
    if lacking and inspect.Parameter.VAR_KEYWORD not in kinds:
        text = f"{name_of_made} does not take {lacking}, which the recipe gives it; "
        text += "torchtune.training.lr_schedulers and transformers.get_*_schedule_* do"
        yield Problem(f"{key}._component_", text)
    for name, parameter in by_name.items():
        if parameter.default is parameter.empty and name not in {*arguments, *from_recipe}:
            yield Problem(f"{key}.{name}", f"it is missing; {name_of_made} needs it")


def _hints(made: Any) -> dict[str, Any]:
    try:
        return get_type_hints(vars(made)["__init__"] if isinstance(made, type) else made)
    except Exception:  # annotations may need imports under TYPE_CHECKING
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Returns False if a value from YAML does not match an annotation.

    Strict JSON mode has the rules of YAML: lists match tuples, strings match paths and enumeration
    values, ints match floats; ``"3"`` and True do not match int. Components in the value and
    annotations that pydantic does not support are not checked.
    """
    if _has_component(value):
        return True
    try:
        TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    except Exception:  # pydantic raises many types for annotations, TypeError for protocols
        return True
    return True


def _has_component(value: Any) -> bool:
    if isinstance(value, dict):
        return "_component_" in value or any(map(_has_component, value.values()))
    return isinstance(value, list) and any(map(_has_component, value))
