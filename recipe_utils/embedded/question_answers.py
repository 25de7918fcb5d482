"""Datasets of (question, answer) pairs in a file."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from torchtune.data import Message
from torchtune.datasets import PackedDataset
from torchtune.datasets._sft import SFTTransform

from recipe_utils.embedded.build_once import build_once
from recipe_utils.files import write_atomically

Pairs = list[tuple[str, str]]
"""(question, answer)."""


def pairs_in_file(path: str, collect: Callable[[], Pairs]) -> Pairs:
    """Returns the pairs of a JSON file; if it does not exist, ``collect`` makes them."""
    build_once(Path(path), lambda: write_atomically(Path(path), json.dumps(collect(), indent=1)))
    return [(question, answer) for question, answer in json.loads(Path(path).read_text())]


def question_answer_dataset(
    pairs: Pairs,
    tokenizer: Any,
    split: str,
    num_validation_samples: int,
    train_on_input: bool = False,
    packed: bool = False,
) -> Dataset[dict[str, Any]]:
    """Returns a tokenized split of ``pairs``.

    Args:
        pairs: pairs in a fixed order.
        tokenizer: tokenizes messages; its ``max_seq_len`` truncates long answers.
        split: ``"train"`` or ``"validation"``.
        num_validation_samples: size of the validation split, drawn with a fixed seed.
        train_on_input: include the question in the targets.
        packed: pack samples into rows of ``tokenizer.max_seq_len`` tokens, as torchtune does.

    Raises:
        ValueError: unknown split.
    """
    of_split = split_of(pairs, split, num_validation_samples)
    dataset = QuestionAnswerDataset(of_split, tokenizer, train_on_input)
    if packed:
        return PackedDataset(dataset, max_seq_len=tokenizer.max_seq_len)
    return dataset


def split_of(pairs: Pairs, split: str, num_validation_samples: int) -> Pairs:
    """Returns the pairs of a split, shuffled with a fixed seed.

    Raises:
        ValueError: unknown split.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split={split}: unknown; set it to 'train' or 'validation'")
    shuffled = list(pairs)
    random.Random(0).shuffle(shuffled)
    if split == "validation":
        return shuffled[:num_validation_samples]
    return shuffled[num_validation_samples:]


class QuestionAnswerDataset(Dataset[dict[str, Any]]):
    """Pairs tokenized as a user's and an assistant's message."""

    def __init__(self, pairs: Pairs, tokenizer: Any, train_on_input: bool = False) -> None:
        self._pairs = pairs
        self._train_on_input = train_on_input
        self._prepare = SFTTransform(model_transform=tokenizer)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        question, answer = self._pairs[index]
        messages = [
            Message(role="user", content=question, masked=not self._train_on_input),
            Message(role="assistant", content=answer, masked=False),
        ]
        sample = self._prepare({"messages": messages})
        return {"tokens": sample["tokens"], "labels": sample["labels"]}
