"""Datasets of (question, answer) pairs in a file."""

import json
import platform
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from torchtune.data import Message
from torchtune.datasets import PackedDataset
from torchtune.datasets._sft import SFTTransform

from recipe_utils.examples.build_once import build_once
from recipe_utils.files import write_atomically
from recipe_utils.torchtune_names import logger

Pairs = list[tuple[str, str]]
"""(question, answer)."""


class TokenizedPairs(Dataset[dict[str, Any]]):
    """Pairs, each tokenized when it is loaded."""

    def __init__(self, pairs: Pairs, tokenize: Callable[[str, str], dict[str, Any]]) -> None:
        self._pairs, self._tokenize = pairs, tokenize

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._tokenize(*self._pairs[index])


def tokenized_pairs(tokenizer: Any, pairs: Pairs, train_on_input: bool = False) -> TokenizedPairs:
    """Returns samples with ``tokens`` and ``labels``, which are those of the answer unless ``train_on_input``."""
    transform = SFTTransform(model_transform=tokenizer)
    return TokenizedPairs(pairs, partial(_tokens_and_labels, transform, train_on_input))


def pairs_in_file(path: str, collect: Callable[[], Pairs]) -> Pairs:
    """Returns the pairs of a JSON file; if it does not exist, ``collect`` makes them from the running Python's library."""

    def write() -> None:
        pairs = collect()
        write_atomically(Path(path), json.dumps(pairs, indent=1))
        logger.info(f"{path}: {len(pairs):,} texts, made of the standard library of Python {platform.python_version()}")

    build_once(Path(path), write)
    return [(question, answer) for question, answer in json.loads(Path(path).read_text())]


def check_split(split: str) -> None:
    """Raises ValueError for an unknown split."""
    if split not in ("train", "validation"):
        raise ValueError(f"split={split}: unknown; set it to 'train' or 'validation'")


def split_of(samples: Sequence[Any], split: str, num_validation_samples: int) -> Any:
    """Returns the samples of a split, shuffled with a fixed seed."""
    check_split(split)
    shuffled = list(samples)
    random.Random(0).shuffle(shuffled)
    return shuffled[:num_validation_samples] if split == "validation" else shuffled[num_validation_samples:]


def dataset_of(name: str, collect: Callable[[], Pairs]) -> Callable[..., Dataset[dict[str, Any]]]:
    """Returns a function ``name`` that builds a dataset of pairs, as ``collect`` makes them in a fixed order."""

    def dataset(
        tokenizer: Any,
        path: str,
        split: str = "train",
        num_validation_samples: int = 64,
        train_on_input: bool = False,
        packed: bool = False,
    ) -> Dataset[dict[str, Any]]:
        """Returns a tokenized split of the pairs in the file ``path``, which the first call writes.

        Args:
            tokenizer: tokenizes messages; its ``max_seq_len`` truncates long answers.
            path: JSON file of the pairs.
            split: ``"train"`` or ``"validation"``.
            num_validation_samples: size of the validation split, drawn with a fixed seed.
            train_on_input: include the question in the targets.
            packed: pack samples into rows of ``tokenizer.max_seq_len`` tokens, as torchtune does.

        Raises:
            ValueError: unknown split.
        """
        pairs = split_of(pairs_in_file(path, collect), split, num_validation_samples)
        samples = tokenized_pairs(tokenizer, pairs, train_on_input)
        return PackedDataset(samples, max_seq_len=tokenizer.max_seq_len) if packed else samples

    dataset.__name__ = name  # in messages about its arguments
    return dataset


def _tokens_and_labels(transform: SFTTransform, train_on_input: bool, question: str, answer: str) -> dict[str, Any]:
    messages = [
        Message(role="user", content=question, masked=not train_on_input),
        Message(role="assistant", content=answer, masked=False),
    ]
    sample = transform({"messages": messages})
    return {"tokens": sample["tokens"], "labels": sample["labels"]}
