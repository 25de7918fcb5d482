"""Messages of chat files as tools write them, converted to the form that chat templates take."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any

from torchtune.data import Message

from recipe_utils.text.conversations.schema import (
    CALL,
    CALLS,
    CONTENT,
    EMPTY,
    THINKING,
    TOOL,
    Call,
    Turn,
    check_not_said,
    parsed,
    shown,
)  # fmt: skip
from recipe_utils.update_steps.samples import SampleError

Chat = list[dict[str, Any]]
"""Messages with ``role``, ``content`` (text, a list of text parts or None), and others in OpenAI's format."""
Tools = list[dict[str, Any]] | None
_TEXT_PARTS = {"text", "input_text", "output_text"}
_IDS = {"id", "type", "index", "call_id", "tool_call_id"}


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


def read_turns(turns: Any) -> tuple[Chat, list[float]]:
    """Returns messages in OpenAI's format, and the weight of each. Raises SampleError that names a turn."""
    turns = parsed(turns)
    if not isinstance(turns, list | tuple) or not all(isinstance(turn, Mapping | Message) for turn in turns):
        raise SampleError(f"its messages are no list of objects with role and content: {shown(turns)}")
    if not turns:
        raise SampleError("its messages are empty; remove the line")
    chat: Chat = []
    weights = []
    for turn in turns:
        for each in [turn] if isinstance(turn, Message) else _turns_in(turn):
            try:
                message, weight = in_openai_format(each)
            except SampleError as error:
                role = each.role if isinstance(each, Message) else each.get("role", each.get("from"))
                raise SampleError(f"turn {len(chat)} ({role}): {error}") from None
            chat.append(message)
            weights.append(weight)
    return chat, weights


def _turns_in(turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the turns in one of other tools.

    Capybara's is a question and its answer. Anthropic's user has results of tools among the parts of its content.
    """
    if turn.keys() >= {"input", "output"} and not turn.keys() & {"role", "from"}:
        return [{"role": role, "content": turn[key]} for role, key in (("user", "input"), ("assistant", "output"))]
    parts = turn.get("content")
    if not isinstance(parts, list) or turn.get("role") != "user" or "tool_result" not in map(_kind_of, parts):
        return [turn]
    turns: list[Mapping[str, Any]] = []
    for is_result, group in groupby(parts, lambda part: _kind_of(part) == "tool_result"):
        if not is_result:
            turns.append({**turn, "content": [*group]})
            continue
        for part in group:
            others = {key: part[key] for key in part if key not in ("type", "tool_use_id", "content")}
            result = {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content") or ""}
            turns.append({**result, **others})
    return turns


def _kind_of(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _with_thinking_apart(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an assistant's message whose first parts are thinking, as Anthropic's and Mistral's, with it under a key."""
    parts = message.get("content")
    thoughts = [*takewhile(lambda part: _kind_of(part) == "thinking", parts)] if isinstance(parts, list) else []
    if not thoughts:
        return message
    if given := [key for key in THINKING if message.get(key)]:
        raise SampleError(f"content has parts of type thinking beside {given[0]}; remove one of them")
    texts = [part.get("thinking") for part in thoughts]
    try:
        text = "".join(text if isinstance(text, str) else content_as_text(text) for text in texts)
    except (TypeError, KeyError):
        raise SampleError(f"content: {shown(thoughts[0])} has no text of thinking; remove it") from None
    return {**message, "content": message["content"][len(thoughts) :], "reasoning_content": text}


def in_openai_format(message: Any) -> tuple[dict[str, Any], float]:
    """Returns a message as templates take it, and the weight of its targets. Keys without a value are as absent.

    Raises SampleError for a message without text, and for one of torchtune with an image, a tool call or
    a tool's result.
    """
    if isinstance(message, Message):
        if message.contains_media or message.ipython or message.role in ("tool", "ipython"):
            text = "torchtune's messages lose tool calls, and images are not supported"
            raise SampleError(f"{text}; set dataset to a conversation_dataset")
        return {"role": message.role, "content": message.text_content}, float(not message.masked)
    if message.get("from") in CALLS:
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": "assistant", "content": None, "tool_calls": message.get("value"), **others}
    message = _with_thinking_apart(message)
    turn = Turn.of(message)
    if turn.role is None:
        kind = message.get("type")
        text = f"it is a {kind}, an item of OpenAI's Responses; write" if kind else "it has no role; write one:"
        raise SampleError(f"{text} turns with role, content and tool_calls")
    weight = float(turn.role == "assistant") if turn.weight is None else turn.weight
    if weight and turn.role != "assistant":
        raise SampleError(f"weight={weight:g} of a {turn.role}: only assistants train")
    # Keys without a value are left out: templates ask whether a key exists.
    openai: dict[str, Any] = {"role": turn.role}
    content_key = turn.used.get("content") or next((key for key in ("content", "value") if key in message), None)
    calls = turn.tool_calls
    if content_key is not None:
        openai["content"], calls = _content(message[content_key], turn.role, calls)
    if calls is not None:
        openai["tool_calls"] = _calls(calls)
    openai.update(turn.others)
    has_more = openai.keys() & (CONTENT - {"content"})
    if openai.get("content") in (None, []) and not has_more:
        form = "; write the parts of Gemini's turns as content" if "parts" in message else ""
        raise SampleError(f"content={message.get(content_key)!r}: it has no text{form}")
    return openai, weight


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
            raise SampleError(f"tools: {shown(tool)} is no tool; write {TOOL}")
        if renamed := function.keys() & {"input_schema", "inputSchema"}:  # of Anthropic and MCP
            read[index] = {"parameters" if key in renamed else key: value for key, value in function.items()}
    return read or None


def content_as_text(content: Any) -> str:
    """Returns the text of a content: of a list, that of its parts, one after the other."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _content(content: Any, role: str, calls: Any) -> tuple[Any, Any]:
    """Returns text, text parts or None, and calls, which Anthropic's assistants have among the parts.

    The result of a tool may have any type: what is no text, nor a list of text parts, becomes JSON text.
    """
    if isinstance(content, str) or (content is None and role != "tool"):
        return content, calls
    # Calls among the parts of an assistant's content become tool_calls.
    listed = content if isinstance(content, list) else []
    kinds = [*map(_kind_of, listed)]
    if role == "assistant" and "tool_use" in kinds:
        if calls is not None:
            raise SampleError("content has parts of type tool_use beside tool_calls; remove one of them")
        calls = [part for part, kind in zip(listed, kinds, strict=True) if kind == "tool_use"]
        listed = [part for part, kind in zip(listed, kinds, strict=True) if kind != "tool_use"]
    if role == "tool" and not (kinds and {*kinds} <= _TEXT_PARTS):
        return json.dumps(content, ensure_ascii=False), calls
    # What is left must be text: an image, or a key that no template prints, would be lost.
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in listed]
    for part in parts:
        if (
            not isinstance(part, Mapping)
            or part.get("type") not in _TEXT_PARTS
            or not isinstance(part.get("text"), str)
        ):
            raise SampleError(f"content: only text is supported, not {shown(part)}")
        check_not_said({key: value for key, value in part.items() if key not in ("type", "text")}, role)
    if not parts and content != [] and calls is None:
        raise SampleError(f"content={str(content)[:60]}: it is no text; write text, or a list of text parts")
    return [{"type": "text", "text": part["text"]} for part in parts] or None, calls


def _calls(given: Any) -> list[dict[str, Any]]:
    """Returns calls with arguments as a mapping. They may be JSON text, one call, or without ``function``."""
    given = parsed(given)
    converted = []
    for each in given if isinstance(given, list) else [given]:
        call = parsed(each)
        function = parsed(call.get("function", call)) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise SampleError(f"tool_calls: {shown(each)} is no call; write {CALL}")
        try:
            inner = {key: value for key, value in function.items() if value not in EMPTY or key not in call}
            read = Call.of({key: value for key, value in {**call, **inner}.items() if key != "function"})
        except SampleError as error:
            raise SampleError(f"tool_calls: {error}") from None
        arguments = read.arguments or {}
        if (unknown := read.others.keys() - _IDS) and not arguments:
            raise SampleError(f"tool_calls: its {', '.join(sorted(unknown))} would be lost; write {CALL}")
        check_not_said({key: read.others[key] for key in unknown}, "assistant")
        others = {key: value for key, value in call.items() if value not in EMPTY and key not in Call.names()}
        if "function" in call:
            others.setdefault("type", "function")  # DeepSeek-V3's template reads it
            function = {**function, "arguments": arguments}
        else:
            others = {"type": "function", **({"id": call["id"]} if "id" in others else {})}
            function = {"name": read.name, "arguments": arguments}
        converted.append({**others, "function": function})
    return converted
