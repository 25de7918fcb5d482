"""Messages of chat files as tools write them, converted to the form that chat templates take."""

import json
import re
from collections.abc import Mapping
from typing import Any

from torchtune.data import Message

from recipe_utils.update_steps.samples import SampleError

Chat = list[dict[str, Any]]
"""Messages with ``role``, ``content`` (text, a list of text parts or None), and others in OpenAI's format."""
Tools = list[dict[str, Any]] | None
THINKING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's thinking, which templates may leave out of earlier turns."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
    **{role: role for role in _ROLES},
}  # fmt: skip
"""``from`` of ShareGPT's messages, and the role."""
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_TEXT_PARTS = ("text", "input_text", "output_text")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CALL = '{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}'
_TOOL = '{"type": "function", "function": {"name": "f", "parameters": {...}}}'


def conversation_of(row: Any) -> dict[str, Any]:
    """Returns ``messages`` and ``tools`` of a row of a file, which may be in ShareGPT's format.

    Raises SampleError with what was found instead.
    """
    if not isinstance(row, Mapping):
        raise SampleError(f"it is a {type(row).__name__}; write one JSON object per line")
    key = next((key for key in ("messages", "conversations") if row.get(key) is not None), None)
    if key is None:
        raise SampleError(f"it has no messages (its keys: {', '.join(row)}); rename its column")
    messages = _parsed(row[key])
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        text = f"{key} is not a list of objects with role and content"
        raise SampleError(f"{text}: {str(row[key])[:60]!r}")
    if not messages:
        raise SampleError(f"{key} is empty; remove the line")
    if row.get("chat_template_kwargs"):
        text = "chat_template_kwargs of a row are not supported"
        raise SampleError(f"{text}; set tokenizer.template_variables for all rows, and remove them")
    if "from" in messages[0] and "role" not in messages[0]:
        messages = [_from_sharegpt(index, message) for index, message in enumerate(messages)]
        if row.get("system") and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": row["system"]}, *messages]
    return {"messages": messages, "tools": row.get("tools")}


def _from_sharegpt(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    sender, value = message.get("from"), message.get("value")
    if sender not in _SHAREGPT:
        text = f"from={sender!r}: set it to one of {', '.join(_SHAREGPT)}"
        raise SampleError(f"turn {index}: {text}")
    others = {key: other for key, other in message.items() if key not in ("from", "value")}
    if sender == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": value, **others}
    return {"role": _SHAREGPT[sender], "content": value, **others}


def read_messages(messages: Any) -> tuple[Chat, list[bool]]:
    """Returns messages in OpenAI's format, and which of them train. Raises SampleError that names a turn."""
    pairs = []
    for index, message in enumerate(messages):
        try:
            pairs.append(in_openai_format(message))
        except SampleError as error:
            role = message.role if isinstance(message, Message) else message.get("role")
            raise SampleError(f"turn {index} ({role}): {error}") from None
    return [message for message, _ in pairs], [is_trained for _, is_trained in pairs]


def in_openai_format(message: Any) -> tuple[dict[str, Any], bool]:
    """Returns a message as templates take it, and if it trains. Keys without a value are as absent.

    Raises SampleError for a message without text, and for one of torchtune with an image, a tool call or
    a tool's result.
    """
    if isinstance(message, Message):
        if message.contains_media or message.ipython or message.role in ("tool", "ipython"):
            text = "torchtune's messages lose tool calls, and images are not supported"
            raise SampleError(f"{text}; set dataset to a conversation_dataset")
        return {"role": message.role, "content": message.text_content}, not message.masked
    # What OpenAI's format excludes, a template would print all the same.
    role, weight = message.get("role"), message.get("weight")
    if role not in _ROLES:
        raise SampleError(f"role={role!r}: set it to one of {', '.join(_ROLES)}")
    if weight not in (None, 0, 1) or isinstance(weight, str):
        raise SampleError(f"weight={weight!r}: set it to 0 or 1, or that of an assistant to any number above 0")
    if weight == 1 and role != "assistant":
        raise SampleError(f"weight=1 of a {role}: only assistants train")
    # Keys without a value are left out: templates ask whether a key exists.
    openai: dict[str, Any] = {"role": role}
    for key, value in message.items():
        if key == "content":
            openai[key] = _content(value, is_result=role == "tool")
        elif key == "tool_calls" and value not in _EMPTY:
            openai[key] = _calls(value)
        elif key not in ("role", "weight") and value not in _EMPTY:
            openai[key] = value
    if half := _SURROGATE.search(json.dumps(openai, ensure_ascii=False, default=str)):
        text = f"it contains {half[0]!r}, half of a character (a lone surrogate)"
        raise SampleError(f"{text}; remove it, or write the whole character")
    has_more = openai.keys() - {"role", "content", "name", "tool_call_id"}
    if openai.get("content") in (None, []) and not has_more:
        raise SampleError(f"content={message.get('content')!r}: it has no text")
    return openai, role == "assistant" and weight != 0


def read_tools(tools: Any) -> Tools:
    """Returns a list of tools in OpenAI's format, which may be JSON text or one tool; None for none.

    Raises SampleError with what was found instead.
    """
    if tools in _EMPTY:
        return None
    parsed = _parsed(tools)
    parsed = list(map(_parsed, parsed if isinstance(parsed, list) else [parsed]))
    for tool in parsed:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise SampleError(f"tools: {str(tool)[:60]!r} is no tool; write {_TOOL}")
    return parsed or None


def content_as_text(content: Any) -> str:
    """Returns the text of a content: of a list, that of its parts, one after the other."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _content(content: Any, is_result: bool) -> Any:
    """Returns text, text parts or None; the result of a tool, which may have any type, as JSON text otherwise."""
    if isinstance(content, str) or (content is None and not is_result):
        return content
    listed = content if isinstance(content, list) else []
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in listed]
    if parts and all(isinstance(part, Mapping) and "type" in part for part in parts):
        for part in parts:
            if part["type"] not in _TEXT_PARTS or not isinstance(part.get("text"), str):
                raise SampleError(f"content: only text is supported, not {str(part)[:60]!r}")
        return [{"type": "text", "text": part["text"]} for part in parts]
    if is_result:
        return json.dumps(content, ensure_ascii=False)
    if content == []:
        return None
    raise SampleError(f"content={str(content)[:60]}: it is no text; write text, or a list of text parts")


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Returns tool calls with arguments as a mapping. They may be JSON text, one call, or without ``function``."""
    parsed = _parsed(calls)
    converted = []
    for given in parsed if isinstance(parsed, list) else [parsed]:
        call = _parsed(given)
        function = _parsed(call.get("function", call)) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise SampleError(f"tool_calls: {str(given)[:60]!r} is no call; write {_CALL}")
        arguments = function.get("arguments")
        arguments = {} if arguments in _EMPTY else _parsed(arguments)
        if not isinstance(arguments, Mapping):
            text = f"{str(arguments)[:60]!r} are no JSON object"
            raise SampleError(f"tool_calls: arguments {text}; write {_CALL}")
        if "function" in call:
            others = {key: value for key, value in call.items() if value not in _EMPTY}
            function = {**function, "arguments": dict(arguments)}
        else:
            others = {"type": "function", **({"id": call["id"]} if call.get("id") else {})}
            function = {"name": function["name"], "arguments": dict(arguments)}
        converted.append({**others, "function": function})
    return converted


def _parsed(value: Any) -> Any:
    """Returns the value of a JSON text; other texts and values as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value
