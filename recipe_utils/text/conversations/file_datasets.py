"""Datasets of conversations, and of documents that are cut into pieces."""

import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from recipe_utils.text.conversations.file_rows import (
    FileRow,
    KeyedRows,
    Texts,
    conversation_of,
    images_of_rows,
    judge_unread,
    lengths_of,
    name_unread_of_first,
)
from recipe_utils.text.conversations.files import temporary_file
from recipe_utils.text.conversations.messages import Conversation
from recipe_utils.text.conversations.paths import PathRows
from recipe_utils.text.conversations.template import num_common
from recipe_utils.text.conversations.tokenizer import FolderTokenizer, Tokenized
from recipe_utils.text.images.sample import ImageInputs
from recipe_utils.torchtune_names import IGNORE_INDEX, log_rank_zero
from recipe_utils.update_steps.samples import Facts, SampleError

_MOST_CHARACTERS = 1 << 24
"""Longest document; a tokenizer takes 4 GB for it."""


class ConversationDataset(Dataset[dict[str, Any]]):
    """Conversations of a file, with the tool calls and thinking that torchtune's datasets drop.

    Args:
        tokenizer: a :class:`FolderTokenizer`.
        path: file or files of rows with ``messages`` and ``tools`` in OpenAI's format, see :class:`.PathRows`.
        split_turns: makes one sample of each assistant turn, whose history is not trained. ``shared``:
            one of each conversation, whose turns compute common beginnings once.
        split, validation_fraction: take the rows of one side, see :class:`.PathRows`.
        ignored_keys: keys of rows, turns and calls that are dropped, and would be refused for their form otherwise.
        image_folder: folder of the images that rows have as paths. Without it, rows may have images whose content is in
            the file, if one of those that are read at the start has.

    Raises:
        ValueError: another tokenizer, another value of ``split_turns`` or ``split``, or a file of another format.
        OSError: ``path`` cannot be read.
    """

    def __init__(
        self,
        tokenizer: Any,
        path: str | list[str],
        split_turns: bool | str = False,
        split: str | None = None,
        validation_fraction: float | None = None,
        ignored_keys: Sequence[str] = (),
        image_folder: str | None = None,
    ) -> None:
        if not isinstance(tokenizer, FolderTokenizer):
            raise ValueError("dataset: set tokenizer to a folder_tokenizer, which takes tool calls")
        if split_turns not in (True, False, "shared"):
            raise ValueError(f"dataset.split_turns={split_turns}: set it to True, False or shared")
        self._has_sequences = split_turns == "shared"
        self._tokenizer = tokenizer
        self._rows = rows = KeyedRows(FileRow, ignored_keys, path, split, validation_fraction)
        self._images = images_of_rows(
            rows, tokenizer, image_folder, partial(conversation_of, variable_names=tokenizer.template_variables)
        )
        name_unread_of_first(self, rows, self._unread_of)
        # Row, and number of messages, of each sample.
        self._turns: tuple[array[int], array[int]] | None = None
        if split_turns is True:
            self._turns = row_indices, ends = array("q"), array("i")
            for index in range(len(rows)):
                try:
                    ends_of_row = _ends_of_turns(self._read(index))
                except Exception:  # any: raised again with the sample
                    ends_of_row = [_ALL]
                ends.extend(ends_of_row)
                row_indices.extend([index] * len(ends_of_row))

    def __len__(self) -> int:
        return len(self._rows) if self._turns is None else len(self._turns[0])

    def facts(self) -> Facts:
        """Returns the hash of its files, and ``has_sequences`` with ``split_turns: shared``."""
        return self._rows.facts()._replace(has_sequences=self._has_sequences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns ``tokens`` and ``labels`` of a conversation, or ``sequences`` with these of each turn.

        A SampleError names the line.
        """
        end = _ALL
        if self._turns is not None:
            index, end = (numbers[index] for numbers in self._turns)
        with self._rows.naming(index):
            row = self._read(index)
            sample = self._of_texts(row) if isinstance(row, Texts) else self._of_messages(row, end)
            masks = (np.equal(each["labels"], IGNORE_INDEX) for each in sample.get("sequences", [sample]))
            judge_unread(self, f"{self._rows.path}", row.unread, lengths_of(masks))
        return sample

    def _unread_of(self, index: int) -> Iterable[str]:
        row = self._read(index)
        if index == 0 and isinstance(row, Conversation):
            self._tokenizer.tokenize(row)  # finds the keys of turns that the template does not print
        return row.unread

    def _read(self, index: int) -> Conversation | Texts:
        row = conversation_of(self._rows[index], self._tokenizer.template_variables)
        return self._images.of_texts(row) if isinstance(row, Texts) else self._images.of(row)

    def _of_texts(self, row: Texts) -> dict[str, Any]:
        (sample,) = (_sample(*each) for each in tokenize_texts(self._tokenizer, row))
        return {"sequences": [sample]} if self._has_sequences else {**sample, "labels": sample["labels"].tolist()}

    def _of_messages(self, row: Conversation, end: int) -> dict[str, Any]:
        is_fraction = [weight not in (0, 1) for weight in row.weights]
        if self._has_sequences:
            if any(is_fraction):
                text = "split_turns=shared keeps no weights of targets; set split_turns=True"
                raise SampleError(f"weight={row.weights[is_fraction.index(True)]:g}: {text}")
            both = self._tokenizer.tokenize_turns(row, [end or len(row.chat) for end in _ends_of_turns(row)])
            return {"sequences": [{**_sample(each.tokens, each.turns < 0), **_beside(each)} for each in both]}
        # A sample of one turn trains that alone: its history is context.
        if end != _ALL:
            weights = [0.0] * (end - 1) + row.weights[end - 1 : end]
            row = replace(row, chat=row.chat[:end], weights=weights)
        tokens, turns, _ = made = self._tokenizer.tokenize(row)
        sample = {
            "tokens": tokens.tolist(),
            "labels": np.where(turns < 0, IGNORE_INDEX, tokens).tolist(),
            **_beside(made),
        }
        if any(is_fraction[: len(row.chat)]):
            # A turn of weight 0 is trained only by tokenizer.train_on_last, which disregards it; -1 is no target.
            sample["weights"] = np.array([*(weight or 1.0 for weight in row.weights), 1.0])[turns]
        return sample


def tokenize_texts(tokenizer: Any, texts: Texts) -> list[tuple[list[int], list[bool]]]:
    """Returns tokens and mask of texts with an end token as TRL: the prompt is masked as far as its tokens are those of all."""
    prompt, answers = texts.prompt, texts.answers
    if prompt is None:
        num_shared = min(num_common(*answers), *(len(answer) - 1 for answer in answers))
        prompt = answers[0][:num_shared].removesuffix(" ")
    else:
        answers = tuple(prompt + answer for answer in answers)
    encode = partial(tokenizer.encode, add_bos=True, add_eos=False)
    if isinstance(tokenizer, FolderTokenizer):  # the texts may be those of a chat template
        encode = partial(encode, is_rendered=True)
    prompt_tokens, *sides = (encode(text=text) for text in (prompt, *answers))
    eos_id, end = tokenizer.eos_id, tokenizer.max_seq_len
    for tokens in sides:
        tokens += [eos_id] if eos_id is not None and tokens[-1:] != [eos_id] else []
    num_masked = min(num_common(prompt_tokens, tokens) for tokens in sides)
    masks = [[i < num_masked for i in range(len(tokens))] for tokens in sides]
    return [(tokens[:end], mask[:end]) for tokens, mask in zip(sides, masks, strict=True)]


def _sample(tokens: Any, mask: Any) -> dict[str, Any]:
    """Returns tokens as they are, and labels as an array."""
    return {"tokens": tokens, "labels": np.where(mask, IGNORE_INDEX, tokens)}


def _beside(made: Tokenized) -> dict[str, ImageInputs]:
    """Returns what a sample has beside tokens and labels."""
    return {} if made.images is None else {"image_inputs": made.images}


_ALL = 0
"""Number of messages of a sample that is not cut."""


def _ends_of_turns(row: Conversation | Texts) -> list[int]:
    """Returns the number of messages up to each trained turn; _ALL if none is."""
    weights = [] if isinstance(row, Texts) else row.weights
    return [number for number, weight in enumerate(weights, 1) if weight] or [_ALL]


class TextPiecesDataset(Dataset[dict[str, Any]]):
    """Documents of a file, cut into pieces of ``tokenizer.max_seq_len`` tokens, for continued pretraining.

    Example: at ``max_seq_len`` 4, the 9 tokens of a document and its end token become pieces of 4, 4 and 2
    tokens. All are targets but the first of each piece, which is only context. A last piece of one token, which
    would have no target, takes one of the piece before. Documents are tokenized at the start, to a temporary file.

    Args:
        tokenizer: has ``encode(text=, add_bos=, add_eos=)`` and ``max_seq_len``; null takes documents as a whole.
        path: file or files of rows with a text, see :class:`.PathRows`; a file named ``.txt`` is one text.
        column: key of a row's text.
        add_eos: adds the end token to each document.
        split, validation_fraction: take the documents of one side, see :class:`.PathRows`.

    Raises:
        ValueError: a wrong split, or a file of another format.
        OSError: ``path`` cannot be read.
    """

    def __init__(
        self,
        tokenizer: Any,
        path: str | list[str],
        column: str = "text",
        add_eos: bool = True,
        split: str | None = None,
        validation_fraction: float | None = None,
    ) -> None:
        self._rows = rows = PathRows(path, split, validation_fraction, text_key=column)
        self._tokenizer, self._column, self._add_eos = tokenizer, column, add_eos
        self._file, start = temporary_file(self), time.monotonic()
        bounds, first_pieces, end = array("q", [0]), array("q"), 0
        with open(self._file, "wb") as file:
            for index in range(len(rows)):
                first_pieces.append(len(bounds) - 1)
                try:
                    tokens = self._tokens_of(rows[index])
                except Exception:  # any: raised again for the piece without tokens
                    tokens = []
                np.asarray(tokens, dtype=np.uint32).tofile(file)
                # Where its pieces end; the last one has two tokens at least, if it can.
                most = tokenizer.max_seq_len or max(len(tokens), 1)
                ends = [*range(most, len(tokens), most), len(tokens)]
                if len(tokens) % most == 1 and len(ends) > 1 and most > 2:
                    ends[-2] -= 1
                bounds.extend(end + piece_end for piece_end in ends)
                end += len(tokens)
        self._bounds, self._first_pieces = bounds, first_pieces
        seconds = time.monotonic() - start
        text = f"{len(rows):,} documents of {end:,} tokens are {len(self):,} pieces (tokenized in {seconds:.0f} s)"
        log_rank_zero(f"{path}: {text}")

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns ``tokens``, equal ``labels``, and that none are cut off; a SampleError names the row."""
        index = range(len(self))[index]
        start, end = self._bounds[index : index + 2]
        if start == end:
            row = bisect_right(self._first_pieces, index) - 1
            with self._rows.naming(row):
                self._tokens_of(self._rows[row])
                raise SampleError("it has no tokens; remove it")
        read = np.fromfile(self._file, dtype=np.uint32, count=end - start, offset=4 * start)
        tokens = read.tolist()
        return {"tokens": tokens, "labels": tokens.copy(), "is_cut": False}

    def _tokens_of(self, row: Mapping[str, Any]) -> list[int]:
        if not isinstance(text := row.get(self._column), str):
            kind = f"{type(text).__name__}, its keys are {', '.join(row)}"
            raise SampleError(f"its {self._column} is no text ({kind}); set column to its key")
        if len(text) > _MOST_CHARACTERS:
            most = f"{_MOST_CHARACTERS:,} characters"
            raise SampleError(f"it has more than {most}; write its parts to rows of JSON Lines")
        others = [key for key, value in row.items() if key != self._column and (value or value == 0)]
        if lost := [key for key in others if key in ("weight", "weights", "loss_weight")]:
            raise SampleError(f"{lost[0]}={row[lost[0]]}: it would be lost; set dataset.loss_weight, or remove it")
        tokens: list[int] = self._tokenizer.encode(text=text, add_bos=True, add_eos=self._add_eos)
        judge_unread(self, f"{self._rows.path}", {key: row[key] for key in others}, [len(tokens)])
        return tokens
