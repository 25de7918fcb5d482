"""Keys of objects in data files as tools write them: each is used, judged by its form, or refused.

Example: of the row {"system_prompt": "Be brief.", "conversations": [...], "topic": "sums", "views": null} two keys are
used under other names (``system``, ``messages``), ``topic`` is named as not read, and ``views`` has no value. With
``"system": "Be long."`` beside it, the row is refused: two texts for one key. With ``"weight": 0.5``, too: what it asks for
would be lost; and with a key of any name that could decide what is trained (``"keep": [1, 0]`` beside two answers, see
:func:`check_lists`), or that the model may have said (see :func:`is_said`), unless ``ignored_keys`` has its name.
The keys of rows are in ``file_rows``, those of turns and calls in ``messages``.
"""

import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from recipe_utils.update_steps.samples import SampleError

THINKING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's thinking, which templates may leave out of earlier turns."""
CONTENT = {
    *THINKING, "content", "tool_calls", "refusal", "audio", "image", "images", "video", "videos", "files", "attachments",
    "documents", "citations",
}  # fmt: skip
"""Keys of a turn whose content would be lost if the template does not print them."""
ROLES = {
    "system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool",
    "human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "ai": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function_response": "tool", "tool_response": "tool", "function": "tool", "ipython": "tool",
}  # fmt: skip
"""Names of roles in files, ``role`` or ``from``, and what chat templates call them."""
CALLS = ("function_call", "tool_call")
"""``from`` of ShareGPT's turns that are calls."""
EMPTY: tuple[Any, ...] = (None, "", [], {})
_SWITCHES = ("on", "off", True, False)
"""Values of a key of thinking that tell how a row was made."""
_WHOLE = ("arguments", "args", "parameters", "tools", "functions", "available_tools")
"""Keys of objects whose keys are content."""
_LEVELS = ("on", "off", "none", "minimal", "low", "medium", "high", "true", "false")
"""Texts of the same, in turns."""
IGNORE = "or set dataset.ignored_keys=[{}]"
"""Remedy for a key that is not read."""
_MOST_WORDS = 4
"""Number of words of a text that labels something, such as a place or a date."""
_IS_THOUGHT = re.compile("think|thought|reasoning|rationale|scratchpad|(^|_)(cot|analysis)(_|$)", re.IGNORECASE)
_IS_LABEL = re.compile("(^|_)(labels?|kto)(_|$)", re.IGNORECASE)


def is_said(key: str, value: Any) -> bool:
    """Returns True if a value of an assistant's turn may be what the model said.

    That is a text of more than a few words, a list of texts or of objects with texts, or whatever is called a thought.
    """
    if isinstance(value, str):
        # Many scripts have no blanks between words.
        num_words = (
            len(value.split()) + len(re.findall("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0eff]", value)) // 2
        )
        return num_words > _MOST_WORDS or bool(_IS_THOUGHT.search(key) and value.lower() not in _LEVELS)
    if isinstance(value, Mapping):
        return any(is_said(f"{key}_{name}", inner) for name, inner in value.items())
    texts = [each for each in value if each] if isinstance(value, list) else []
    objects = [name for each in texts if isinstance(each, Mapping) for name, text in each.items() if _has_text(text)]
    return bool({*objects} - {"id", "type"}) or any(not isinstance(each, Mapping) and _has_text(each) for each in texts)


def check_not_said(values: Mapping[str, Any], role: str, owner: str = "") -> None:
    """Raises SampleError, for ``owner``, if one of the values of an assistant's turn, which nobody reads, may be what the model said."""
    for key, value in values.items():
        if role == "assistant" and is_said(key, value):
            text = f"{owner}its {key}={shown(value)} may be what the model said, and would be lost"
            raise PartError(f"{text}; write it as reasoning_content or content, {IGNORE.format(key)}")


def _has_text(value: Any) -> bool:
    if isinstance(value, list | Mapping):
        return any(map(_has_text, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, str) and bool(value.strip())


def check_lists(values: Mapping[str, Any], lengths: Collection[int], may_have_logprobs: bool) -> None:
    """Raises SampleError if one of the values, which nobody reads, has a number in one of ``lengths`` that decides something.

    These are masks, of 0 (False) and 1, and log-probabilities: at most 0. A value may be a list of lists, such as one for
    each answer of a group.
    """
    for key, value in values.items():
        for numbers in value if isinstance(value, list) and value and isinstance(value[0], list) else [value]:
            if not isinstance(numbers, list) or not numbers or len(numbers) not in lengths:
                continue
            if (0 in numbers or "0" in numbers) and all(each in (0, 1, "0", "1") for each in numbers):
                text = f"{len(numbers)} numbers 0 and 1, as many as what may be trained: a mask that is not read would be lost"
                raise SampleError(f"{key}: {text}; rename it to a key that is read, {IGNORE.format(key)}")
            are_logprobs = any(numbers) and all(isinstance(each, int | float) and each <= 0 for each in numbers)
            if may_have_logprobs and are_logprobs:
                text = "numbers of at most 0, one for each token, would be lost; write log-probabilities as logprobs"
                raise SampleError(f"{key}: {text}, {IGNORE.format(key)}")


def check_no_label(values: Mapping[str, Any]) -> None:
    """Raises SampleError if one of the values, which nobody reads, tells good answers from bad ones, as KTO's ``label`` does."""
    for key, value in values.items():
        verdict = value.lower() if isinstance(value, str) else value
        if _IS_LABEL.search(key) and verdict in (0, 1, "true", "false"):
            text = "bad answers would be trained as good ones; remove the key, and the rows of bad answers"
            raise SampleError(f"{key}={value!r}: it would be lost, and {text}, {IGNORE.format(key)}")


def without_keys(value: Any, ignored: Collection[str]) -> Any:
    """Returns a row without keys; so are its turns, their parts and their calls. Arguments, tools and texts stay."""
    if not ignored:
        return value
    inner = parsed(value)
    if isinstance(inner, Mapping) and not isinstance(value, str):
        return {
            key: each if key in _WHOLE else without_keys(each, ignored)
            for key, each in inner.items()
            if key not in ignored
        }
    objects = [each for each in inner if isinstance(each, Mapping)] if isinstance(inner, list) else []
    are_turns = objects and all({"role", "from", "type", "function", "name"} & each.keys() for each in objects)
    return [without_keys(each, ignored) for each in inner] if are_turns else value


def parsed(value: Any) -> Any:
    """Returns the value of a JSON text; other texts and values as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


def shown(value: Any) -> str:
    """Returns the beginning of a value, for errors."""
    return repr(value if len(str(value)) <= 60 else str(value)[:60])


def role_of(turn: Mapping[str, Any]) -> str:
    """Returns the role of a turn in a file, as chat templates call it; "" for an unknown one."""
    return ROLES.get(str(turn.get("role", turn.get("from"))), "")


def joined(value: Any) -> Any:
    """Returns the text of a list of text parts; other values as they are."""
    are_parts = isinstance(value, list) and all(isinstance(each, Mapping) and "text" in each for each in value)
    return "".join(map(str, (each["text"] for each in value))) if are_parts else value


def _are_equal(one: Any, other: Any) -> bool:
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def known_as(meaning: str, *names: str, is_empty: bool = False) -> Any:
    """Returns a field of :class:`Keys` with the names that it has in files, the preferred one first.

    ``""``, ``[]`` and ``{}`` are values if it may be empty (``is_empty``); of other fields they are as absent.
    """
    return Field(
        None, validation_alias=AliasChoices(*names), description=meaning, json_schema_extra={"is_empty": is_empty}
    )


class PartError(SampleError):
    """Raised by validators for a part of a value, which the text names."""


class Keys(BaseModel):
    """Keys of a mapping under their names in files. Of two names of one key, the second must have the same value."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)
    _used: dict[str, str] = PrivateAttr(default_factory=dict)
    lost: ClassVar[Mapping[str, str]] = {}
    """Further keys, whose content would be lost, and what to write instead."""

    @classmethod
    @cache
    def names(cls) -> dict[str, str]:
        """Returns the keys of files, and the field of each."""
        fields: Any = cls.model_fields
        return {name: field for field, info in fields.items() for name in info.validation_alias.choices}

    @classmethod
    @cache
    def may_be_empty(cls) -> frozenset[str]:
        """Returns the fields of which ``""``, ``[]`` and ``{}`` are values."""
        fields: Any = cls.model_fields
        return frozenset(field for field, info in fields.items() if info.json_schema_extra["is_empty"])

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Returns the keys with a value; others are as absent.

        Raises SampleError for a value of another type, for two names with different values, and for content that
        would be lost.
        """
        names, filled = cls.names(), {key: value for key, value in given.items() if value or value == 0}
        # An empty value counts where no other name of its field has one.
        for key, value in given.items() if len(filled) < len(given) else ():
            field = names.get(key)
            if field in cls.may_be_empty() and value is not None and all(names.get(each) != field for each in filled):
                filled[key] = value
        try:
            keys = cls.model_validate(filled)
        except ValidationError as error:
            first = error.errors()[0]
            key = next(key for key in filled if names.get(key) == names[str(first["loc"][0])])
            cause = first.get("ctx", {}).get("error", first["msg"])
            value = "" if isinstance(cause, PartError) else f"={shown(first['input'])}"
            raise SampleError(f"{key}{value}: {cause}") from None
        # Further names of a key that is used must repeat its value; what a key of ``lost`` asks for would not be done.
        others = keys.others
        keys._used = {names[key]: key for key in filled if key not in others}
        for key in [*others]:
            if field := names.get(key):
                alone = {name: value for name, value in given.items() if names.get(name) != field or name == key}
                if not _are_equal(getattr(cls.of(alone), field), getattr(keys, field)):
                    text = "have different values for one thing; remove one of them"
                    raise SampleError(f"{key} and {keys.used[field]} {text}")
                del others[key]
            elif key in cls.lost and not (key in THINKING and given[key] in _SWITCHES):
                raise SampleError(f"{key}={shown(given[key])}: it would be lost; {cls.lost[key]}")
        return keys

    @property
    def used(self) -> dict[str, str]:
        """The fields that have a value, with the key of the file that each is read from."""
        return (self.__pydantic_private__ or {})["_used"]  # five times as fast as the attribute

    @property
    def others(self) -> dict[str, Any]:
        """Keys that this model does not have, with their values."""
        return self.__pydantic_extra__ or {}


WEIGH = 'write "weight": 0 in the messages that do not train'
MEDIA = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text is supported here")


def table_of(keys_by_place: Mapping[str, type[Keys]]) -> str:
    """Returns the table of accepted keys of a page."""
    lines = ["| in | key (first name; others) | value |", "| --- | --- | --- |"]
    for where, keys in keys_by_place.items():
        for info in keys.model_fields.values():
            alias: Any = info.validation_alias
            first, *others = (f"`{name}`" for name in alias.choices)
            lines.append(
                f"| {where} | {'; '.join([first, ', '.join(others)][: 1 + bool(others)])} | {info.description} |"
            )
    return "\n".join(lines)
