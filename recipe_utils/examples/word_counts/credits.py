"""Advantages of single tokens: answers that are worse than others are blamed where they go wrong.

Example: "What does `list.clear` do? Answer in 5 words." Tokens are words here, and E ends an answer.

====================================  =======================================
answer                                tokens with an advantage
====================================  =======================================
Remove all items from list . E        all: it is better than the group's mean
Remove all the old items from it . E  "from it . E": the words too many
Remove all items . E                  ". E": it ends too early
Remove Remove E                       all: it is no sentence
====================================  =======================================

``python -m recipe_utils.examples.word_counts.credits ROUNDS FOLDER TOKENIZER`` writes the files of rounds again with such
advantages.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from recipe_utils.examples.stdlib_docs import docstring_tokenizer
from recipe_utils.examples.word_counts.questions import count_words, write_rows

Decode = Callable[[list[int]], str]


def main(rounds: str, folder: str, tokenizer_path: str) -> None:
    """Writes the files of ``rounds`` to ``folder``, with advantages of tokens."""
    decode = docstring_tokenizer(tokenizer_path).decode
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(rounds).glob("round_*.jsonl")):
        groups = map(json.loads, file.read_text().splitlines())
        write_rows(Path(folder, file.name), (credited(group, decode) for group in groups))


def credited(group: dict[str, Any], decode: Decode) -> dict[str, Any]:
    """Returns a row of a group of answers with an advantage for each token."""
    (wanted,) = re.findall(r"Answer in (\d+) words", decode(group["prompt_ids"]))
    rewards, advantages = group["rewards"], []
    for tokens, reward in zip(group["completion_ids"], rewards, strict=True):
        # As `advantage: mean_std` computes it for the whole answer.
        advantage = (reward - mean(rewards)) / (stdev(rewards) + 1e-6)
        start = 0 if advantage > 0 else _first_wrong(tokens, int(wanted), decode)
        advantages.append([advantage if i >= start else 0.0 for i in range(len(tokens))])
    return {**group, "advantages": advantages}


def _first_wrong(tokens: list[int], num_wanted: int, decode: Decode) -> int:
    """Returns the place of the token from which an answer is wrong."""
    num_words = [len(decode(tokens[: i + 1]).split()) for i in range(len(tokens))]
    if num_words[-1] > num_wanted:
        return next(i for i, number in enumerate(num_words) if number > num_wanted)
    # The last two tokens of a sentence are its period and the end of the answer.
    return len(tokens) - 2 if count_words(decode(tokens)) else 0


if __name__ == "__main__":
    main(*sys.argv[1:])
