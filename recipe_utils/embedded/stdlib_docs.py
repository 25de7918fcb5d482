"""The embedded default's data: real text that every Python carries, and a tokenizer trained on it.

Thousands of question/answer samples from the docstrings of the standard library and from
``pydoc_data.topics``, of very different length, without a download. Docstrings are read from the
sources; nothing is imported.
"""

import ast
import base64
import inspect
import json
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from torchtune.data import Message
from torchtune.datasets import PackedDataset
from torchtune.datasets._sft import SFTTransform
from torchtune.models.llama3 import Llama3Tokenizer
from torchtune.models.llama3._tokenizer import CL100K_PATTERN

from recipe_utils.embedded.build_once import build_once

SKIPPED_DIRS = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "turtledemo",
}

SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)


def docstring_dataset(
    tokenizer: Any,
    path: str,
    split: str = "train",
    num_validation_samples: int = 64,
    train_on_input: bool = False,
    packed: bool = False,
) -> Dataset[dict[str, Any]]:
    """Questions about Python's standard library and their answers.

    Args:
        tokenizer: turns messages into tokens; its ``max_seq_len`` truncates long answers.
        path: file of the (question, answer) pairs; the first call collects them and writes it.
        split: ``"train"`` or ``"validation"``.
        num_validation_samples: size of the validation split, drawn with a fixed seed.
        train_on_input: whether the tokens of the question are targets, too.
        packed: pack samples into rows of ``tokenizer.max_seq_len`` tokens, as torchtune does.

    Raises:
        ValueError: unknown split.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split={split}: unknown; set it to 'train' or 'validation'")
    pairs = question_answer_pairs(path)
    random.Random(0).shuffle(pairs)
    chosen = (
        pairs[:num_validation_samples] if split == "validation" else pairs[num_validation_samples:]
    )
    dataset = QuestionAnswerDataset(chosen, tokenizer, train_on_input)
    if packed:
        return PackedDataset(dataset, max_seq_len=tokenizer.max_seq_len)
    return dataset


class QuestionAnswerDataset(Dataset[dict[str, Any]]):
    """Tokenizes (question, answer) pairs as a user's and an assistant's message."""

    def __init__(
        self, pairs: list[tuple[str, str]], tokenizer: Any, train_on_input: bool = False
    ) -> None:
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


def question_answer_pairs(path: str) -> list[tuple[str, str]]:
    """All (question, answer) pairs, in a fixed order; over 5,500 with Python 3.11.

    Args:
        path: JSON file that holds them; it is written first if it does not exist.
    """
    build_once(Path(path), lambda: _write_whole(Path(path), json.dumps(_collect(), indent=1)))
    return [(question, answer) for question, answer in json.loads(Path(path).read_text())]


def _collect() -> list[tuple[str, str]]:
    pairs = [
        (f"What does `{name}` do?", docstring)
        for source in sorted(_library_sources())
        for name, docstring in _docstrings(source)
    ]
    topics = ast.parse((_library_dir() / "pydoc_data" / "topics.py").read_text(encoding="utf-8"))
    assignment = topics.body[-1]
    assert isinstance(assignment, ast.Assign | ast.AnnAssign)
    assert assignment.value is not None
    for topic, text in ast.literal_eval(assignment.value).items():
        pairs.append((f"Explain `{topic}` in Python.", text.strip()))
    return pairs


def docstring_tokenizer(
    path: str, docstrings_path: str, vocab_size: int = 4096, max_seq_len: int | None = None
) -> Llama3Tokenizer:
    """A Llama 3 tokenizer whose byte-pair merges are learned from the training text.

    The first call trains it, some seconds, and writes it to ``path`` in the format of Llama 3's own
    ``tokenizer.model``; later calls and other processes read it from there.

    Args:
        path: the tokenizer's file; its special tokens are written beside it as
            ``special_tokens.json``.
        docstrings_path: file of the text to train on, see :func:`question_answer_pairs`.
        vocab_size: tokens in all, the special ones included.
        max_seq_len: samples are truncated to it [tokens].
    """
    special_tokens_path = Path(path).with_name("special_tokens.json")

    def train() -> None:
        ranks = _train_byte_pairs(
            question_answer_pairs(docstrings_path), vocab_size - len(SPECIAL_TOKENS)
        )
        special_tokens = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        special_tokens_path.write_text(json.dumps(special_tokens, indent=2))
        lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
        _write_whole(Path(path), "\n".join(lines) + "\n")

    build_once(Path(path), train)
    return Llama3Tokenizer(
        path=str(path),
        special_tokens=json.loads(special_tokens_path.read_text()),
        max_seq_len=max_seq_len,
    )


def _library_dir() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _library_sources() -> Iterator[Path]:
    for folder, subfolders, files in os.walk(_library_dir()):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_DIRS]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of a module and what it defines at its top and in its classes."""
    parts = path.relative_to(_library_dir()).with_suffix("").parts
    module = ".".join(part for part in parts if part != "__init__")
    if _is_private(module):
        return
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    nodes: list[tuple[str, ast.AST]] = [(module, tree)]
    while nodes:
        name, node = nodes.pop(0)
        assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        docstring = ast.get_docstring(node)
        if docstring and len(docstring) > 20:
            yield name, inspect.cleandoc(docstring)
        if isinstance(node, ast.Module | ast.ClassDef):
            nodes.extend(
                (f"{name}.{child.name}", child)
                for child in node.body
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and not _is_private(child.name)
            )


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _train_byte_pairs(pairs: list[tuple[str, str]], num_tokens: int) -> dict[bytes, int]:
    """Byte-pair encoding over the training text: token bytes -> rank, lowest merged first."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Llama 3's own pre-tokenizer, so that the learned merges are those that encoding will use.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CL100K_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [f"{question}\n\n{answer}" for question, answer in pairs]
    tokenizer.train_from_iterator(text, trainer)
    byte_of = _byte_of_printable()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {bytes(byte_of[char] for char in token): rank for token, rank in vocab}


def _byte_of_printable() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes (GPT-2's table) -> the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def _write_whole(path: Path, text: str) -> None:
    """Writes under another name and renames, so that ``path`` is whole or not there."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)
