"""Dataset of preference pairs in files.

Example: the row {"prompt": [user A], "chosen": [assistant B], "rejected": [assistant C]} becomes the conversations
A B and A C. What comes before the answers, earlier assistant turns included, is context on both sides.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Message

import recipe_utils.preference.torchtune_pairs  # noqa: F401  corrects torchtune
from recipe_utils.preference.rows import SIDES, messages_of
from recipe_utils.text.conversations.messages import content_as_text, conversation_of, in_openai_format, read_tools
from recipe_utils.text.conversations.paths import PathRows
from recipe_utils.text.conversations.template import num_common
from recipe_utils.text.conversations.tokenizer import FolderTokenizer
from recipe_utils.text.torchtune_messages import lost_keys
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

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a pair as torchtune's preference datasets; a SampleError names the row."""
        with self._rows.naming(index):
            row = self._rows[index]
            sides = self._of_texts(row) if _is_of_texts(row) else self._of_messages(row)
        sample = {}
        for side, (tokens, mask) in zip(SIDES, sides, strict=True):
            sample[f"{side}_input_ids"] = tokens
            sample[f"{side}_labels"] = np.where(mask, CROSS_ENTROPY_IGNORE_IDX, tokens).tolist()
        return sample

    def _of_messages(self, row: Mapping[str, Any]) -> list[tuple[list[int], list[bool]]]:
        (prompt, answers), tokenized = messages_of(row), []
        prompt = [{**message, "weight": 0} for message in prompt]
        for side, answer in zip(SIDES, answers, strict=True):
            try:
                conversation = {"messages": [*prompt, *answer], "tools": row.get("tools")}
                tokenized.append(self._tokenized(conversation_of(conversation)))
            except SampleError as error:
                raise SampleError(f"{side}: {error}") from error
        return tokenized

    def _tokenized(self, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
        messages, tools = row["messages"], row.get("tools")
        if isinstance(self._tokenizer, FolderTokenizer):
            return self._tokenizer.tokenize_messages(messages, tools=tools)
        if read_tools(tools):
            raise SampleError("torchtune's tokenizers take no tools; set tokenizer to a folder_tokenizer")
        tokens, mask = self._tokenizer.tokenize_messages([*map(_torchtune_message, messages)])
        return tokens, mask

    def _of_texts(self, row: Mapping[str, Any]) -> list[tuple[list[int], list[bool]]]:
        """Returns texts with an end token as TRL: the prompt is masked as far as its tokens are those of both sides."""
        chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
        if prompt is None:
            num_shared = min(num_common(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
            prompt = chosen[:num_shared].removesuffix(" ")
        else:
            chosen, rejected = prompt + chosen, prompt + rejected
        encode = partial(self._tokenizer.encode, add_bos=True, add_eos=False)
        prompt, *sides = (encode(text=text) for text in (prompt, chosen, rejected))
        eos_id, end = self._tokenizer.eos_id, self._tokenizer.max_seq_len
        for tokens in sides:
            tokens += [eos_id] if eos_id is not None and tokens[-1:] != [eos_id] else []
        num_masked = min(num_common(prompt, tokens) for tokens in sides)
        masks = [[i < num_masked for i in range(len(tokens))] for tokens in sides]
        return [(tokens[:end], mask[:end]) for tokens, mask in zip(sides, masks, strict=True)]


def _is_of_texts(row: Mapping[str, Any]) -> bool:
    texts = [row.get(key) for key in ("prompt", *SIDES)]
    return all(isinstance(text, str) for text in texts[1:]) and isinstance(texts[0], str | None)


def _torchtune_message(message: Mapping[str, Any]) -> Message:
    openai, is_trained = in_openai_format(message)
    if lost := lost_keys(message):
        raise SampleError(f"torchtune's tokenizers lose {', '.join(lost)}; set tokenizer to a folder_tokenizer")
    content = content_as_text(openai.get("content"))
    return Message(role=openai["role"], content=content, masked=not is_trained)
