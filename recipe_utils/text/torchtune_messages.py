"""Corrects torchtune 0.6.1 when it is imported: rows of which it would lose a part are refused.

Of a message whose content is null or a number, it trains the message before as the answer; of one with tool calls or
thinking, what is left without them. A row's system text, question and tools are lost beside its conversation, and so
are those of preference pairs, of which it trains pairs without ``prompt``, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torchtune.data import (
    AlpacaToMessages,
    ChosenRejectedToMessages,
    InputOutputToMessages,
    Message,
    OpenAIToMessages,
    ShareGPTToMessages,
)  # fmt: skip

from recipe_utils.text.conversations.file_rows import (
    FileRow,
    after_system,
    check_repeated,
    name_unread,
    read_row,
    turns_in,
)
from recipe_utils.text.conversations.messages import Conversation, Turn, Turns, content_as_text
from recipe_utils.text.conversations.schema import CALLS, MEDIA, THINKING, check_not_said, role_of
from recipe_utils.text.images.sample import ImageInputs
from recipe_utils.update_steps.samples import SampleError


def lost_keys(message: Mapping[str, Any]) -> list[str]:
    """Returns the keys with content that torchtune's messages do not have."""
    calls = ["from"] if message.get("from") in CALLS else []
    return [*calls, *(key for key in (*THINKING, "tool_calls", "function_call") if message.get(key))]


def check_no_fraction(weights: Sequence[float], owner: str = "") -> None:
    """Raises SampleError, for ``owner``, for a weight that a mask does not have."""
    if fraction := next((weight for weight in weights if weight not in (0, 1)), None):
        text = "the losses of pairs and rollouts take no weights; set it to 0 or 1"
        raise SampleError(f"{owner}weight={fraction:g}: {text}")


def tokenize_conversation(
    tokenizer: Any, conversation: Conversation
) -> tuple[Sequence[int], Sequence[bool] | np.ndarray, ImageInputs | None]:
    """Returns tokens [t] of a conversation, True for those that are no targets [t], and its images, by any tokenizer.

    Raises SampleError for weights, which the mask does not have, and for content that one of torchtune's would lose.
    """
    check_no_fraction(conversation.weights)
    if hasattr(tokenizer, "template_variables"):  # a FolderTokenizer, which needs the library transformers
        tokens, turns, images = tokenizer.tokenize(conversation)
        return tokens.tolist(), turns < 0, images
    if conversation.tools:
        raise SampleError("torchtune's tokenizers take no tools; set tokenizer to a folder_tokenizer")
    messages = []
    for message, weight in zip(conversation.chat, conversation.weights, strict=True):
        if lost := lost_keys(message):
            raise SampleError(f"torchtune's tokenizers lose {', '.join(lost)}; set tokenizer to a folder_tokenizer")
        if weight:
            check_not_said({key: message[key] for key in message if key not in ("role", "content")}, message["role"])
        content = content_as_text(message.get("content"))
        messages.append(Message(role=message["role"], content=content, masked=not weight))
    tokens, mask = tokenizer.tokenize_messages(messages)
    return tokens, mask, None


def check_row(transform: Any, row: Mapping[str, Any], columns: Sequence[str], remedy: str) -> None:
    """Checks a row with messages in ``columns``, and names its keys that are not read.

    Raises SampleError if torchtune loses a part of a message or of what is beside them, ValueError for one without text.
    """
    # Messages one by one: torchtune reads their role and text, and nothing else.
    messages = [message for column in columns for message in row[column]]
    for message in messages:
        if lost := lost_keys(message):
            text = f"torchtune's messages lose tool calls and thinking (its {', '.join(lost)})"
            raise SampleError(f"{text}; {remedy}")
        marks = [key for key, field in Turn.names().items() if field == "weight" and key in message]
        weight = Turn.of({key: message[key] for key in marks}).weight if marks else None
        if weight not in (None, 1) and role_of(message) == "assistant":
            raise SampleError(f"torchtune's messages lose its {', '.join(marks)}; {remedy}")
        check_not_said({key: message[key] for key in message if key not in Turn.names()}, role_of(message))
        if not isinstance(_content(message), (str, list)):
            raise ValueError(f"the content of a message is {_content(message)!r} instead of text")
    texts = [content if isinstance(content := _content(message), str) else "" for message in messages]
    chat = [{"role": role_of(message), "content": text} for message, text in zip(messages, texts, strict=True)]
    check_beside(transform, row, columns, chat, remedy)


def check_beside(
    transform: Any, row: Mapping[str, Any], columns: Sequence[str], chat: Sequence[dict[str, Any]], remedy: str
) -> None:
    """Checks what stands beside the ``columns`` of a row, which may repeat a turn of ``chat``, but not add one, nor tools."""
    keys, _ = read_row(FileRow, {key: turns_in(value) for key, value in row.items() if key not in (*columns, *MEDIA)})
    check_repeated({**keys.turns_before(), **keys.answers()}, [*chat], columns[0], remedy)
    is_replaced = getattr(transform, "new_system_prompt", None) is not None
    if not is_replaced and len(after_system(keys.system, Turns([*chat], [])).chat) > len(chat):
        raise SampleError(f"torchtune's datasets leave its system text out; {remedy}")
    if keys.tools:
        raise SampleError(f"torchtune's datasets leave its tools out; {remedy}")
    name_unread(transform, "dataset", keys.others)


def _content(message: Mapping[str, Any]) -> Any:
    return message.get("content", message.get("value"))


def _check_rows(transform: Any, columns: Sequence[str], remedy: str) -> None:
    """Makes a transform's class check the messages in its ``columns`` before it converts a row."""
    convert = transform.__call__

    def convert_whole(self: Any, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        names = [self._column_map[column] for column in columns]
        for messages in (sample[name] for name in names if len(names) > 1):
            if not isinstance(messages, list):
                text = "instead of a list of messages, as torchtune takes them"
                raise SampleError(f"it has {str(messages)[:60]!r} {text}; {remedy}")
        check_row(self, sample, names, remedy)
        converted: Mapping[str, Any] = convert(self, sample)
        return converted

    transform.__call__ = convert_whole


def _check_texts(transform: Any, before: Sequence[str], remedy: str) -> None:
    """Makes a transform's class check what stands beside the texts in ``before`` and ``output``, of which it makes two turns."""
    convert = transform.__call__

    def convert_whole(self: Any, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        own = getattr(self, "_column_map", None) or getattr(self, "column_map", None) or {}
        names = [own.get(column, column) for column in (*before, "output")]
        *texts, answer = (sample.get(name) or "" for name in names)
        chat = [("user", "\n".join(map(str, texts))), ("assistant", answer)]
        check_beside(self, sample, names, [{"role": role, "content": text} for role, text in chat], remedy)
        converted: Mapping[str, Any] = convert(self, sample)
        return converted

    transform.__call__ = convert_whole


_check_texts(InputOutputToMessages, ["input"], "set dataset to a conversation_dataset")
_check_texts(AlpacaToMessages, ["instruction", "input"], "set dataset to a conversation_dataset")
_check_rows(OpenAIToMessages, ["messages"], "set dataset to a conversation_dataset")
_check_rows(ShareGPTToMessages, ["conversations"], "set dataset to a conversation_dataset")
_check_rows(ChosenRejectedToMessages, ["chosen", "rejected"], "set dataset to a recipe_utils.preference.pair_dataset")
