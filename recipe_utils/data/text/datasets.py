"""Datasets of chat files."""

import json
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from recipe_utils.data.loader.samples import SampleError
from recipe_utils.data.text.messages import conversation_of, in_openai_format
from recipe_utils.data.text.tokenizer import FolderTokenizer


class ConversationDataset(Dataset[dict[str, Any]]):
    """Conversations of a JSON Lines file, with the tool calls and thinking that torchtune's drop.

    Args:
        tokenizer: a :class:`FolderTokenizer`.
        path: file with an object per line, ``messages`` and ``tools`` in OpenAI's format; kept in memory.
        split_turns: makes one sample of each assistant turn, whose history is not trained. ``shared``:
            one of each conversation, whose turns compute common beginnings once.

    Raises:
        ValueError: another tokenizer, or another value of ``split_turns``.
        OSError: ``path`` cannot be read.
    """

    def __init__(self, tokenizer: Any, path: str, split_turns: bool | str = False) -> None:
        if not isinstance(tokenizer, FolderTokenizer):
            raise ValueError("dataset: set tokenizer to a folder_tokenizer, which takes tool calls")
        if split_turns not in (True, False, "shared"):
            text = "set it to True, False or shared"
            raise ValueError(f"dataset.split_turns={split_turns}: {text}")
        self.makes_trees = split_turns == "shared"
        self._path, self._tokenizer = path, tokenizer
        # Line, content, numbers of messages
        self._rows: list[tuple[int, bytes, list[int | None]]] = []
        for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
            ends: list[int | None] = _ends_of_turns(line) if split_turns else [None]
            of_samples = [ends] if self.makes_trees else [[end] for end in ends]
            self._rows += [(number, line, ends) for ends in of_samples if line.strip()]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns ``tokens`` and ``labels`` of a conversation, or ``sequences`` with these of each turn.

        A SampleError names the line.
        """
        number, line, ends = self._rows[index]
        try:
            row = conversation_of(_object(line))
            if self.makes_trees:
                turns = [end for end in ends if end] or [len(row["messages"])]
                both = self._tokenizer.tokenize_turns(row["messages"], turns, row["tools"])
                return {"sequences": list(starmap(_sample, both))}
            messages = row["messages"][: ends[0]]
            if ends[0] is not None:
                messages[:-1] = [{**message, "weight": 0} for message in messages[:-1]]
            sample = _sample(*self._tokenizer.tokenize_messages(messages, tools=row["tools"]))
            return {**sample, "labels": sample["labels"].tolist()}
        except Exception as error:  # any: a row may have any form
            kind = "" if isinstance(error, SampleError) else f"{type(error).__name__}: "
            raise SampleError(f"line {number} of {self._path}: {kind}{error}") from None


def _sample(tokens: Any, mask: Any) -> dict[str, Any]:
    """Returns tokens as they are, and labels as an array."""
    return {"tokens": tokens, "labels": np.where(mask, CROSS_ENTROPY_IGNORE_IDX, tokens)}


def _object(line: bytes) -> Any:
    """Returns the object of a line; raises SampleError with what was found instead."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        text = f"byte {error.start} is not UTF-8; convert the file, such as with iconv"
        raise SampleError(text) from error
    except json.JSONDecodeError as error:
        raise SampleError(f"it is not one JSON object per line ({error})") from error


def _ends_of_turns(line: bytes) -> list[int | None]:
    """Returns the number of messages up to each trained turn; None for a row that fails on loading."""
    try:
        pairs = enumerate(map(in_openai_format, conversation_of(_object(line))["messages"]), 1)
        return [number for number, (_, is_trained) in pairs if is_trained] or [None]
    except Exception:  # any: reported with the sample
        return [None]
