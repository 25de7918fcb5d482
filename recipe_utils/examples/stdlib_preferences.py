"""Preference pairs of the embedded text: a docstring, and the same with two words exchanged."""

import random
import re
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from torchtune.data import Message

from recipe_utils.examples.question_answers import Pairs, TokenizedPairs, split_of
from recipe_utils.examples.stdlib_docs import docstring_pairs
from recipe_utils.torchtune_names import IGNORE_INDEX

MIN_WORDS = 4
"""Minimum number of words of a docstring's first paragraph."""


def word_order_dataset(
    tokenizer: Any, path: str, split: str = "train", num_validation_samples: int = 200
) -> Dataset[dict[str, Any]]:
    """Returns questions about Python's standard library with a chosen and a rejected answer.

    Chosen is the first paragraph of the docstring, in one line; rejected is the same with two
    neighboring words exchanged. For the arguments see :func:`.docstring_dataset`.
    """
    answers = first_paragraphs(docstring_pairs(path))
    return TokenizedPairs(split_of(answers, split, num_validation_samples), partial(_tokenized_sides, tokenizer))


def first_paragraphs(pairs: Pairs) -> Pairs:
    """Returns first paragraphs of docstrings, in one line, with their questions.

    They have at least MIN_WORDS words, two of them different. Equal ones are returned once: methods
    of many classes share a docstring, and validation samples must not be in the training split.
    """
    question_of: dict[str, str] = {}
    for question, docstring in pairs:
        words = re.split(r"\n\s*\n", docstring, maxsplit=1)[0].split()
        if question.startswith("What does ") and len(words) >= MIN_WORDS and len(set(words)) > 1:
            question_of.setdefault(" ".join(words), question)
    return [(question, answer) for answer, question in question_of.items()]


def exchange_neighbors(text: str, seed: str) -> str:
    """Returns a text with two different neighboring words exchanged; ``seed`` determines which.

    Words are separated by one space, and not all are equal.
    """
    words = text.split(" ")
    places = [i for i, pair in enumerate(pairwise(words)) if pair[0] != pair[1]]
    # `random` hashes a text seed without the hash seed of the process.
    i = random.Random(seed).choice(places)
    words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)


def _tokenized_sides(tokenizer: Any, question: str, answer: str) -> dict[str, Any]:
    """Returns a sample as torchtune's ``PreferenceDataset``.

    It has the tokens of both sides, including the question, and their labels, -100 for the question.
    """
    sample: dict[str, Any] = {}
    sides = {"chosen": answer, "rejected": exchange_neighbors(answer, question)}
    for side, content in sides.items():
        messages = [
            Message(role="user", content=question, masked=True),
            Message(role="assistant", content=content, masked=False),
        ]
        tokens, masked = tokenizer.tokenize_messages(messages)
        sample[f"{side}_input_ids"] = tokens
        sample[f"{side}_labels"] = list(np.where(masked, IGNORE_INDEX, tokens))
    return sample
