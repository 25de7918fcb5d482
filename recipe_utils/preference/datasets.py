"""Dataset of preference pairs in files.

Example: the row {"prompt": [user A], "chosen": [assistant B], "rejected": [assistant C]} becomes the conversations
A B and A C. What comes before the answers, earlier assistant turns included, is context on both sides.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from recipe_utils.preference.rows import SIDES, read_pair
from recipe_utils.text.conversations.datasets import tokenize_texts
from recipe_utils.text.conversations.messages import Conversation
from recipe_utils.text.conversations.paths import PathRows
from recipe_utils.text.conversations.rows import Texts, name_unread, name_unread_of_first
from recipe_utils.text.torchtune_messages import tokenize_conversation
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
            tokenized: Sequence[tuple[Sequence[int], Any]]
            if isinstance(row, Texts):
                tokenized = tokenize_texts(self._tokenizer, row)
            else:
                tokenized = self._of_messages(row)
        name_unread(self, f"{self._rows.path}", _unread(row))
        sample = {}
        for side, (tokens, mask) in zip(SIDES, tokenized, strict=True):
            sample[f"{side}_input_ids"] = tokens
            sample[f"{side}_labels"] = np.where(mask, IGNORE_INDEX, tokens).tolist()
        return sample

    def _read(self, index: int) -> tuple[Conversation, Conversation] | Texts:
        return read_pair(self._rows[index], getattr(self._tokenizer, "template_variables", ()))

    def _of_messages(self, sides: Sequence[Conversation]) -> list[tuple[Sequence[int], Any]]:
        tokenized = list[tuple[Sequence[int], Any]]()
        for name, side in zip(SIDES, sides, strict=True):
            try:
                tokenized.append(tokenize_conversation(self._tokenizer, side))
            except SampleError as error:
                raise SampleError(f"{name}: {error}") from error
        return tokenized


def _unread(row: tuple[Conversation, Conversation] | Texts) -> list[str]:
    return row.unread if isinstance(row, Texts) else row[0].unread
