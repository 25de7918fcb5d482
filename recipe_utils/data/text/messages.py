"""Messages of chat files, converted to the form that chat templates take."""

import json
from collections.abc import Mapping
from typing import Any

from torchtune.data import Message

from recipe_utils.data.loader.samples import SampleError

TEXT_KEYS = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = {"role", "weight", "name", "tool_call_id", *TEXT_KEYS}


def conversation_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of a chat file; raises SampleError with what was found instead of ``messages``."""
    if "messages" not in row:
        raise SampleError(f"it has no messages (its keys: {', '.join(row)}); rename its column")
    found = row["messages"]
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        text = "messages is not a list of objects with role and content"
        raise SampleError(f"{text}: {str(found)[:60]!r}")
    if not found:
        raise SampleError("messages is empty; remove the line")
    return dict(row)


def in_openai_format(message: Any) -> tuple[dict[str, Any], bool]:
    """Returns a message as templates take it, with tool calls' arguments parsed, and if it trains.

    Raises SampleError for a message of torchtune with an image, a tool call or a tool's result.
    """
    if isinstance(message, Message):
        if message.contains_media or message.ipython or message.role in ("tool", "ipython"):
            text = "torchtune's messages lose tool calls, and images are not supported"
            raise SampleError(f"{text}; set dataset to a conversation_dataset")
        return {"role": message.role, "content": message.text_content}, not message.masked
    role, content, weight = (message.get(key) for key in ("role", "content", "weight"))
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    has_text = bool(content) or any(message.get(key) for key in TEXT_KEYS)
    for is_wrong, text in (
        (role not in _ROLES, f"role={role!r}: set it to one of {', '.join(_ROLES)}"),
        (message.keys() - _KEYS, f"unknown keys {sorted(message.keys() - _KEYS)}; remove them"),
        (
            weight not in (None, 0, 1) or isinstance(weight, str),
            f"weight={weight!r}: set it to 0 or 1",
        ),
        (weight == 1 and role != "assistant", f"weight=1 of a {role}: only assistants train"),
        (not has_text and content != "", f"content={content!r}: it has no text"),
        (not isinstance(content, str | list | None), f"content={content!r}: it is no text"),
        (any(part.get("type") != "text" for part in parts), "content: only text is supported"),
    ):
        if is_wrong:
            raise SampleError(text)
    openai = {key: value for key, value in message.items() if key != "weight"}
    openai["tool_calls"] = calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        if isinstance(arguments := call["function"]["arguments"], str):
            call["function"] = {**call["function"], "arguments": json.loads(arguments)}
    if not calls:
        del openai["tool_calls"]  # some templates only test if the key exists
    return openai, message["role"] == "assistant" and message.get("weight") != 0
