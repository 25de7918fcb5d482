"""Text samples: padded and packed rows.

Importing it corrects torchtune 0.6.1: of a message whose content is null or a number, it trains the
message before as the answer.
"""

from collections.abc import Mapping
from typing import Any

from torchtune.data import OpenAIToMessages

_convert = OpenAIToMessages.__call__


def _convert_text(self: OpenAIToMessages, sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises ValueError for a message without text, else as torchtune."""
    for message in sample[self._column_map["messages"]]:
        if not isinstance(message["content"], (str, list)):
            raise ValueError(f"the content of a message is {message['content']!r} instead of text")
    return _convert(self, sample)


OpenAIToMessages.__call__ = _convert_text
