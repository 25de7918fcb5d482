"""Messages of chat files as tools write them, converted to the form that chat templates take.

Example: {"from": "gpt", "value": "So.", "function_call": {"name": "f"}} is {"role": "assistant", "content": "So.", "tool_calls":
[{"type": "function", "function": {"name": "f", "arguments": {}}}]} with the weight 1.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from math import inf
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import PlainValidator, ValidationInfo
from torchtune.data import Message

from recipe_utils.text.conversations.schema import (
    CALLS,
    CONTENT,
    EMPTY,
    ROLES,
    THINKING,
    WEIGH,
    Keys,
    PartError,
    check_not_said,
    known_as,
    parsed,
    role_of,
    shown,
)
from recipe_utils.text.images.sources import is_image, source_of
from recipe_utils.update_steps.samples import SampleError

Chat = list[dict[str, Any]]
"""Messages with ``role``, ``content`` (text, a list of text parts or None), and others in OpenAI's format."""
Tools = list[dict[str, Any]] | None
_TEXT_PARTS = {"text", "input_text", "output_text"}
_IDS = {"id", "type", "index", "call_id", "tool_call_id"}
_CALL = '{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}'
_TOOL = '{"type": "function", "function": {"name": "f", "parameters": {...}}}'


class Turns(NamedTuple):
    """Messages in OpenAI's format, and the weight of the targets of each; 0 if it is not trained."""

    chat: Chat
    weights: list[float]

    def behind(self, context: Chat) -> "Turns":
        """Returns the turns behind others, which are not trained."""
        return Turns([*context, *self.chat], [*(0.0 for _ in context), *self.weights])


@dataclass(frozen=True)
class Conversation:
    """A conversation in OpenAI's format, and what its chat template gets beside it."""

    chat: Chat
    weights: list[float]
    """Weight of the targets of each message; 0 if it is not trained."""
    tools: Tools = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    unread: dict[str, Any] = field(default_factory=dict)
    """What is not read of the row and of its turns, by its key."""
    images: Sequence[object] | None = None
    """Images of the parts of type ``image``, see :mod:`recipe_utils.text.images.sources`; None if the data are texts."""
    image_folder: Path | None = None
    """Folder of images that are paths."""


# ---- Keys of a turn and of its calls, whose validators return what templates take --------------------


def _role(role: Any) -> str:
    if not isinstance(role, str) or role not in ROLES:
        raise SampleError(f"set it to one of {', '.join(dict.fromkeys(ROLES.values()))}")
    return ROLES[role]


def _weight(weight: Any, info: ValidationInfo) -> float:
    if isinstance(weight, str) or not isinstance(weight, int | float) or not 0 <= weight < inf:
        raise SampleError("set it to 0 or 1, or that of an assistant to any number above 0")
    if weight and info.data.get("role") not in ("assistant", None):
        raise SampleError("only assistants train; remove it")
    return float(weight)


def _content(content: Any, info: ValidationInfo) -> str | Chat | None:
    """Returns text, text parts, or None for an empty list of them.

    The result of a tool may have any type: what is no text, nor a list of text parts and images, becomes JSON text.
    """
    if isinstance(content, str):
        return content
    role, is_list = info.data.get("role") or "", isinstance(content, list)
    are_parts = is_list and all(_kind_of(part) in _TEXT_PARTS or is_image(part) for part in content)
    if role == "tool" and not (content and are_parts):
        return json.dumps(content, ensure_ascii=False)
    if not is_list:
        raise SampleError("it is no text; write text, or a list of text parts")
    return [_part(part, role) for part in content] or None


def _part(part: Any, role: str) -> dict[str, Any]:
    """Returns a part of a content as templates take it; raises SampleError if it is no text, and would be lost."""
    part = {"type": "text", "text": part} if isinstance(part, str) else part
    if is_image(part):
        return {"type": "image", "image": source_of(part)}
    if _kind_of(part) not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise PartError(f"only text and images are supported, not {shown(part)}")
    check_not_said({key: value for key, value in part.items() if key not in ("type", "text")}, role)
    return {"type": "text", "text": part["text"]}


def _kind_of(part: Any) -> str | None:
    return str(part.get("type")) if isinstance(part, Mapping) else None


def _calls(given: Any) -> Chat:
    """Returns calls with arguments as a mapping. They may be JSON text, one call, or without ``function``."""
    given = parsed(given)
    try:
        return [_call(parsed(call)) for call in (given if isinstance(given, list) else [given])]
    except SampleError as error:
        raise PartError(str(error)) from None


def _call(call: Any) -> dict[str, Any]:
    function = parsed(call.get("function", call)) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise SampleError(f"{shown(call)} is no call; write {_CALL}")
    inner = {key: value for key, value in function.items() if value not in EMPTY}
    read = Call.of({key: value for key, value in {**call, **inner}.items() if key != "function"})
    unknown, arguments = read.others.keys() - _IDS, read.arguments or {}
    if unknown and not arguments:
        raise SampleError(f"its {', '.join(sorted(unknown))} would be lost; write {_CALL}")
    check_not_said({key: read.others[key] for key in unknown}, "assistant")
    others = {key: value for key, value in call.items() if value not in EMPTY and key not in Call.names()}
    if "function" in call:
        others.setdefault("type", "function")  # DeepSeek-V3's template reads it
        return {**others, "function": {**function, "arguments": arguments}}
    ids = {"id": call["id"]} if "id" in others else {}
    return {"type": "function", **ids, "function": {"name": read.name, "arguments": arguments}}


def _arguments(value: Any) -> dict[str, Any]:
    if not isinstance(arguments := parsed(value), Mapping):
        raise SampleError(f"it is no JSON object; write {_CALL}")
    return dict(arguments)


class Call(Keys):
    """A call of a tool, or its ``function``."""

    name: str | None = known_as("name of the tool", "name")
    arguments: Annotated[dict[str, Any] | None, PlainValidator(_arguments)] = known_as(
        "an object, its JSON text, or nothing", "arguments", "args", "parameters", "input"
    )


class Turn(Keys):
    """A turn of a conversation. Its other keys are given to the chat template."""

    role: Annotated[str | None, PlainValidator(_role)] = known_as(
        "`system`, `developer`, `user`, `assistant`, `tool`, or what other tools call them", "role", "from"
    )
    content: Annotated[str | Chat | None, PlainValidator(_content)] = known_as(
        "text, or a list of parts: text, joined if the template has no branch for lists, and [images](#images); of a tool also any "
        "other value, as JSON text", "content", "value", is_empty=True
    )  # fmt: skip
    tool_calls: Annotated[Chat | None, PlainValidator(_calls)] = known_as(
        "a list, one call, or JSON text; a turn `from` `function_call` has them as its `value`",
        "tool_calls", "function_call",
    )  # fmt: skip
    weight: Annotated[float | None, PlainValidator(_weight)] = known_as(
        "of an assistant, 0 or more: the [weight](#weights-of-targets) of its targets (not with `split_turns: shared`)",
        "weight", "train", "training", "trainable", "loss", "loss_mask",
    )  # fmt: skip
    lost = dict.fromkeys(("mask", "masked", "train_detail", "weights"), WEIGH)


# ---- Validators of the keys of rows ---------------------------------------------------------------


def read_turns(turns: Any) -> Turns:
    """Returns messages in OpenAI's format, and the weight of each. Raises SampleError that names a turn."""
    turns = parsed(turns)
    if not isinstance(turns, list | tuple) or not all(isinstance(turn, Mapping | Message) for turn in turns):
        raise SampleError("it is no list of objects with role and content; write one")
    if not turns:
        raise SampleError("its messages are empty; remove the line")
    read = Turns([], [])
    for turn in turns:
        try:
            messages = [_of_torchtune(turn)] if isinstance(turn, Message) else map(_in_openai_format, _turns_in(turn))
            for message, weight in messages:
                read.chat.append(message)
                read.weights.append(weight)
        except SampleError as error:
            role = turn.role if isinstance(turn, Message) else turn.get("role", turn.get("from"))
            raise PartError(f"turn {len(read.chat)} ({role}): {error}") from None
    return read


def read_text_or_turns(value: Any) -> str | Turns:
    """Returns a text as it is; and a turn, or a list of turns, as :func:`read_turns`."""
    if isinstance(value, str):
        return value
    turns = [value] if isinstance(value, Mapping) and value.keys() & {"role", "from"} else value
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise SampleError("it is neither text nor a list of objects with role and content; write it as text")
    return read_turns(turns)


def as_turns(value: str | Turns, role: str) -> Turns:
    """Returns a text as a turn of ``role``; turns as they are."""
    return Turns([{"role": role, "content": value}], [float(role == "assistant")]) if isinstance(value, str) else value


def read_tools(tools: Any) -> Tools:
    """Returns a list of tools in OpenAI's format, which may be JSON text or one tool; None for none.

    Raises SampleError with what was found instead.
    """
    if (tools := parsed(tools)) in EMPTY:
        return None
    read = [*map(parsed, tools if isinstance(tools, list) else [tools])]
    for index, tool in enumerate(read):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PartError(f"{shown(tool)} is no tool; write {_TOOL}")
        if renamed := function.keys() & {"input_schema", "inputSchema"}:  # of Anthropic and MCP
            read[index] = {"parameters" if key in renamed else key: value for key, value in function.items()}
    return read


# ---- Turns of other tools -------------------------------------------------------------------------


def _of_torchtune(message: Message) -> tuple[dict[str, Any], float]:
    if message.contains_media or message.ipython or message.role in ("tool", "ipython"):
        text = "torchtune's messages lose tool calls, and images are not supported"
        raise SampleError(f"{text}; set dataset to a conversation_dataset")
    return {"role": message.role, "content": message.text_content}, float(not message.masked)


def _turns_in(turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the turns in one of other tools, with calls, results and thinking under keys of their own.

    Capybara's and the Cauldron's are a question and its answer, and ShareGPT's may be a call. Anthropic's has them among the
    parts of its content.
    """
    for question, answer in (("input", "output"), ("user", "assistant")):
        if turn.keys() >= {question, answer} and not turn.keys() & {"role", "from"}:
            return [{"role": "user", "content": turn[question]}, {"role": "assistant", "content": turn[answer]}]
    if turn.get("from") in CALLS:
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        return [{"role": "assistant", "content": None, "tool_calls": turn.get("value"), **others}]
    parts = turn.get("content")
    if not isinstance(parts, list):
        return [turn]
    kinds, role = [*map(_kind_of, parts)], role_of(turn)
    if role == "user" and "tool_result" in kinds:
        return _with_results_apart(turn)
    if kinds[:1] == ["thinking"]:
        turn = _with_thinking_apart(turn)
    if role == "assistant" and "tool_use" in kinds:
        if turn.get("tool_calls") or turn.get("function_call"):
            raise SampleError("content has parts of type tool_use beside tool_calls; remove one of them")
        calls = [part for part in turn["content"] if _kind_of(part) == "tool_use"]
        texts = [part for part in turn["content"] if _kind_of(part) != "tool_use"]
        turn = {**turn, "content": texts, "tool_calls": calls}
    return [turn]


def _with_results_apart(turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    turns: list[Mapping[str, Any]] = []
    for is_result, group in groupby(turn["content"], lambda part: _kind_of(part) == "tool_result"):
        if not is_result:
            turns.append({**turn, "content": [*group]})
            continue
        for part in group:
            others = {key: part[key] for key in part if key not in ("type", "tool_use_id", "content")}
            result = {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content") or ""}
            turns.append({**result, **others})
    return turns


def _with_thinking_apart(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a turn whose first parts are thinking, as Anthropic's and Mistral's, with it under a key."""
    thoughts = [*takewhile(lambda part: _kind_of(part) == "thinking", turn["content"])]
    if given := [key for key in THINKING if turn.get(key)]:
        raise SampleError(f"content has parts of type thinking beside {given[0]}; remove one of them")
    try:
        text = "".join(content_as_text(part.get("thinking")) for part in thoughts)
    except (TypeError, KeyError):
        raise SampleError(f"content: {shown(thoughts[0])} has no text of thinking; remove it") from None
    return {**turn, "content": turn["content"][len(thoughts) :], "reasoning_content": text}


def _in_openai_format(turn: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Returns a message as templates take it, and the weight of its targets. Keys without a value are as absent."""
    keys = Turn.of(turn)
    if keys.role is None:
        kind = turn.get("type")
        text = f"it is a {kind}, an item of OpenAI's Responses; write" if kind else "it has no role; write one:"
        raise SampleError(f"{text} turns with role, content and tool_calls")
    weight = float(keys.role == "assistant") if keys.weight is None else keys.weight
    # Keys without a value are left out: templates ask whether a key exists.
    openai: dict[str, Any] = {"role": keys.role}
    if turn.keys() & {"content", "value"}:
        openai["content"] = "null" if keys.content is None and keys.role == "tool" else keys.content
    if keys.tool_calls is not None:
        openai["tool_calls"] = keys.tool_calls
    openai.update(keys.others)
    if openai.get("content") is None and not openai.keys() & (CONTENT - {"content"}):
        form = "; write the parts of Gemini's turns as content" if "parts" in turn else ""
        raise SampleError(f"content={turn.get('content', turn.get('value'))!r}: it has no text{form}")
    return openai, weight


def content_as_text(content: Any) -> str:
    """Returns the text of a content: of a list, that of its parts, one after the other."""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content or ""
