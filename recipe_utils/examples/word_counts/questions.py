"""Questions about Python's standard library that ask for a number of words, and a reward that counts them.

Example: "What does `list.clear` do? Answer in 5 words."

=================================  ======  ==============================================
answer                             reward
=================================  ======  ==============================================
Remove all items from list.        1.0     five words
Remove all items.                  0.0     three words
Remove all of the items now.       0.5     six words
remove all items from list.        0.0     no sentence: it begins with a small letter
Remove all items from items.       0.0     a word occurs twice
=================================  ======  ==============================================
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recipe_utils.examples.build_once import build_once
from recipe_utils.examples.question_answers import Pairs, split_of
from recipe_utils.examples.stdlib_docs import docstring_pairs
from recipe_utils.examples.stdlib_preferences import first_paragraphs
from recipe_utils.files import write_atomically

NUM_WORDS = range(4, 11)
"""Numbers of words that questions ask for."""
NUM_VALIDATION_QUESTIONS = 64


def word_count_reward(prompts: Sequence[str], completions: Sequence[str], num_words: Sequence[int]) -> list[float]:
    """Returns 1 for each sentence of ``num_words`` different words, 0.5 for one word more or less, and 0 otherwise."""
    counts = map(count_words, completions)
    return [
        max(0.0, 1 - abs(count - wanted) / 2) if count else 0.0 for count, wanted in zip(counts, num_words, strict=True)
    ]


def count_words(text: str) -> int:
    """Returns the number of words of a sentence; 0 for any other text.

    It begins with a capital, has one period, at its end, and no word twice.
    """
    words = text.split()
    different = {word.lower().strip(".,") for word in words}
    return len(words) if re.fullmatch(r"[A-Z][^.]*\.", text) and len(different) == len(words) else 0


def questions_with_answers(docstrings_path: str, split: str) -> Pairs:
    """Returns questions of a split; the answers are the first paragraphs of docstrings that are such sentences."""
    pairs = [
        (f"{question} Answer in {count_words(answer)} words.", answer)
        for question, answer in first_paragraphs(docstring_pairs(docstrings_path))
        if count_words(answer) in NUM_WORDS
    ]
    return split_of(pairs, split, NUM_VALIDATION_QUESTIONS)


def write_prompts(folder: Path, docstrings_path: str) -> None:
    """Writes ``prompts.jsonl`` and ``prompts_val.jsonl``, of other docstrings, unless they exist."""
    for split, name in (("train", "prompts.jsonl"), ("validation", "prompts_val.jsonl")):
        build_once(folder / name, partial(_write_prompts, folder / name, docstrings_path, split))


def _write_prompts(path: Path, docstrings_path: str, split: str) -> None:
    pairs = questions_with_answers(docstrings_path, split)
    write_rows(path, ({"prompt": question, "num_words": count_words(answer)} for question, answer in pairs))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes JSON Lines."""
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
