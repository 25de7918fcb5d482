"""Messages of preference pairs, in the forms that rows of files have."""

from collections.abc import Mapping
from typing import Any

from recipe_utils.text.conversations.template import num_common
from recipe_utils.update_steps.samples import SampleError

SIDES = ("chosen", "rejected")
_BEFORE = ("system", "developer")
"""Roles of messages that come before the first turn."""
Messages = list[dict[str, Any]]


def messages_of(row: Mapping[str, Any]) -> tuple[Messages, list[Messages]]:
    """Returns the messages of a pair's prompt, with all that both sides begin with, and of both answers.

    Raises SampleError if ``chosen`` or ``rejected`` is missing, or where the answers begin is not certain.
    """
    for side in SIDES:
        if not row.get(side):
            text = "a row has chosen and rejected, and may have prompt"
            raise SampleError(f"it has no {side} (its keys: {', '.join(row)}); {text}")
    # The prompt may be a part of both sides, or a key of its own.
    prompt = listed_messages(row.get("prompt"), "user")
    sides = [listed_messages(row[side], "assistant") for side in SIDES]
    if prompt and all(has_prompt(prompt, side) for side in sides):
        prompt = []
    elif prompt and prompt[-1].get("role") not in _BEFORE:
        for name, messages in zip(SIDES, sides, strict=True):
            if (role := messages[0].get("role")) not in ("assistant", "tool"):
                text = f"its {name} begins with a turn of the {role} that is not its prompt's"
                raise SampleError(f"{text}; let it begin with the whole prompt, or with the answer")
    most = min(map(len, sides)) - 1
    num_shared = num_common(sides[0][:most], sides[1])
    return [*prompt, *sides[0][:num_shared]], [side[num_shared:] for side in sides]


def has_prompt(prompt: Messages, side: Messages) -> bool:
    """Returns True if a side begins with the prompt's messages, perhaps after a system message."""
    texts = [(message.get("role"), message.get("content")) for message in prompt]
    side_texts = [(message.get("role"), message.get("content")) for message in side[:-1]]
    num_before = next((i for i, (role, _) in enumerate(side_texts) if role not in _BEFORE), 0)
    return any(side_texts[start:][: len(texts)] == texts for start in (0, num_before))


def has_own_prompt(prompt: Any, side: Messages) -> bool:
    """Returns True if a side is a whole conversation: a prompt of messages is in it, or its first turn is no answer."""
    if isinstance(prompt, str):
        roles = (message.get("role") for message in side)
        return next((role for role in roles if role not in _BEFORE), None) not in ("assistant", "tool")
    return not isinstance(prompt, list) or has_prompt(prompt, side)


def listed_messages(value: Any, role: str) -> Messages:
    """Returns a text, a message or a list of messages as a list, without keys that have no value."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    messages = [value] if isinstance(value, Mapping) else value or []
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise SampleError(f"its {role}'s messages are {str(value)[:60]!r}; write a text or messages")
    return [{k: v for k, v in message.items() if v is not None} for message in messages]
