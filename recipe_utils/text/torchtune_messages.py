"""Corrects torchtune 0.6.1 when it is imported: messages of which it would lose a part are refused.

Of a message whose content is null or a number, it trains the message before as the answer; of one with tool calls or
thinking, what is left without them.
"""

from collections.abc import Mapping
from typing import Any

from torchtune.data import OpenAIToMessages

from recipe_utils.text.conversations.messages import THINKING
from recipe_utils.update_steps.samples import SampleError

_convert = OpenAIToMessages.__call__


def lost_keys(message: Mapping[str, Any]) -> list[str]:
    """Returns the keys with content that torchtune's messages do not have."""
    return [key for key in (*THINKING, "tool_calls") if message.get(key)]


def check_message(message: Mapping[str, Any], remedy: str) -> None:
    """Raises ValueError for a message without text, SampleError for one of which torchtune loses a part."""
    if lost := lost_keys(message):
        text = f"torchtune's messages lose tool calls and thinking (its {', '.join(lost)})"
        raise SampleError(f"{text}; {remedy}")
    if not isinstance(message["content"], (str, list)):
        raise ValueError(f"the content of a message is {message['content']!r} instead of text")


def _convert_text(self: OpenAIToMessages, sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Checks messages, then as torchtune."""
    for message in sample[self._column_map["messages"]]:
        check_message(message, "set dataset to a conversation_dataset")
    return _convert(self, sample)


OpenAIToMessages.__call__ = _convert_text
