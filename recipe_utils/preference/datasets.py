"""Dataset of preference pairs in files.

Example: the row {"prompt": [user A], "chosen": [assistant B], "rejected": [assistant C]} becomes the conversations
A B and A C. What comes before the answers, earlier assistant turns included, is context on both sides.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from torchtune.data import Message

from recipe_utils.preference.rows import SIDES, read_pair
from recipe_utils.text.conversations.datasets import tokenize_texts
from recipe_utils.text.conversations.messages import Conversation, content_as_text
from recipe_utils.text.conversations.paths import PathRows
from recipe_utils.text.conversations.rows import Texts, name_unread, name_unread_of_first
from recipe_utils.text.conversations.tokenizer import FolderTokenizer
from recipe_utils.text.torchtune_messages import lost_keys
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.samples import SampleError


class PairDataset(Dataset[dict[str, Any]]):
    """Preference pairs of a file, in the forms that TRL takes.

    A row has ``chosen`` and ``rejected``, and may have ``prompt`` and ``tools``. Messages are in OpenAI's format, with
    or without the prompt's. Three texts, or two with a common beginning, are joined as they are, without a chat template.

    Args:
        tokenizer: a :class:`FolderTokenizer`; or one of torchtune for rows without tool calls and thinking.
        path: file or files of rows, see :class:`.PathRows`.
        split, validation_fraction: take the rows of one side, see :class:`.PathRows`.

    Raises:
        ValueError: a wrong split, or a file of another format.
        OSError: ``path`` cannot be read.
    """

    def __init__(
        self, tokenizer: Any, path: str | list[str], split: str | None = None, validation_fraction: float | None = None
    ) -> None:
        self._tokenizer, self._rows = tokenizer, PathRows(path, split, validation_fraction)
        self.content_hash = self._rows.content_hash
        name_unread_of_first(self, self._rows, lambda index: _unread(self._read(index)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a pair as torchtune's preference datasets; a SampleError names the row."""
        with self._rows.naming(index):
            row = self._read(index)
            tokenized = tokenize_texts(self._tokenizer, row) if isinstance(row, Texts) else self._of_messages(row)
        name_unread(self, f"{self._rows.path}", _unread(row))
        sample = {}
        for side, (tokens, mask) in zip(SIDES, tokenized, strict=True):
            sample[f"{side}_input_ids"] = tokens
            sample[f"{side}_labels"] = np.where(mask, IGNORE_INDEX, tokens).tolist()
        return sample

    def _read(self, index: int) -> tuple[Conversation, Conversation] | Texts:
        return read_pair(self._rows[index], getattr(self._tokenizer, "template_variables", ()))

    def _of_messages(self, sides: Sequence[Conversation]) -> list[tuple[list[int], Any]]:
        tokenized = []
        for name, side in zip(SIDES, sides, strict=True):
            try:
                tokenized.append(self._tokenized(side))
            except SampleError as error:
                raise SampleError(f"{name}: {error}") from error
        return tokenized

    def _tokenized(self, side: Conversation) -> tuple[list[int], Any]:
        if isinstance(self._tokenizer, FolderTokenizer):
            tokens, owners = self._tokenizer.tokenize(side)
            return tokens.tolist(), owners < 0
        if side.tools:
            raise SampleError("torchtune's tokenizers take no tools; set tokenizer to a folder_tokenizer")
        messages = []
        for message, weight in zip(side.chat, side.weights, strict=True):
            if lost := lost_keys(message):
                raise SampleError(f"torchtune's tokenizers lose {', '.join(lost)}; set tokenizer to a folder_tokenizer")
            content = content_as_text(message.get("content"))
            messages.append(Message(role=message["role"], content=content, masked=not weight))
        return self._tokenizer.tokenize_messages(messages)


def _unread(row: tuple[Conversation, Conversation] | Texts) -> list[str]:
    return row.unread if isinstance(row, Texts) else row[0].unread
