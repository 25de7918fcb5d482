"""The embedded text as preferences: a sentence of a docstring is better than the same with two words exchanged."""

import random
import re
from itertools import pairwise
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Message

from recipe_utils.embedded.question_answers import Pairs, split_of
from recipe_utils.embedded.stdlib_docs import docstring_pairs

MIN_WORDS = 4
"""Of a docstring's first paragraph; shorter ones are left out."""


def word_order_dataset(
    tokenizer: Any,
    path: str,
    split: str = "train",
    num_validation_samples: int = 200,
) -> Dataset[dict[str, Any]]:
    """Questions about Python's standard library, each with a good and a spoilt answer.

    Good is the first paragraph of the docstring asked for, in one line; spoilt is the same with two
    neighbouring words exchanged.

    Args:
        tokenizer: turns messages into tokens; its ``max_seq_len`` truncates each side.
        path: file of the docstrings, see :func:`recipe_utils.embedded.stdlib_docs.docstring_pairs`; the
            first call collects them and writes it.
        split: ``"train"`` or ``"validation"``.
        num_validation_samples: size of the validation split, drawn with a fixed seed.

    Raises:
        ValueError: unknown split.
    """
    answers = first_paragraphs(docstring_pairs(path))
    return WordOrderDataset(split_of(answers, split, num_validation_samples), tokenizer)


def first_paragraphs(pairs: Pairs) -> Pairs:
    """What docstrings begin with, in one line, for the questions of :func:`docstring_pairs` that ask for one.

    Only those of at least MIN_WORDS words, two of them different. Of equal answers the first alone: methods
    of many classes share theirs, and what is held out for validation must not be trained on.
    """
    found: dict[str, str] = {}
    for question, docstring in pairs:
        words = re.split(r"\n\s*\n", docstring, maxsplit=1)[0].split()
        if question.startswith("What does ") and len(words) >= MIN_WORDS and len(set(words)) > 1:
            found.setdefault(" ".join(words), question)
    return [(question, answer) for answer, question in found.items()]


def exchange_neighbours(text: str, seed: str) -> str:
    """The text's words with two different neighbours exchanged, at a place drawn with ``seed``.

    Args:
        text: words with one space between them, two of them different.
        seed: any text; equal ones draw equal places.

    Raises:
        ValueError: no two words are different.
    """
    words = text.split(" ")
    places = [i for i, pair in enumerate(pairwise(words)) if pair[0] != pair[1]]
    if not places:
        raise ValueError(f"{text!r}: no two words are different")
    # Seeded with text, `random` hashes it itself, alike in all processes.
    i = random.Random(seed).choice(places)
    words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)


class WordOrderDataset(Dataset[dict[str, Any]]):
    """Tokenizes (question, answer) pairs with the answer as it is and with two words exchanged.

    A sample has the keys and the values of torchtune's ``PreferenceDataset``: tokens of both sides, question
    included, and labels of the same length, which are -100 for the question's.
    """

    def __init__(self, pairs: Pairs, tokenizer: Any) -> None:
        self._pairs = pairs
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        question, answer = self._pairs[index]
        sides = {"chosen": answer, "rejected": exchange_neighbours(answer, question)}
        sample: dict[str, Any] = {}
        for side, content in sides.items():
            messages = [
                Message(role="user", content=question, masked=True),
                Message(role="assistant", content=content, masked=False),
            ]
            tokens, masked = self._tokenizer.tokenize_messages(messages)
            sample[f"{side}_input_ids"] = tokens
            sample[f"{side}_labels"] = list(np.where(masked, CROSS_ENTROPY_IGNORE_IDX, tokens))
        return sample
