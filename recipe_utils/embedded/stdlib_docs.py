"""Data of the embedded default: questions about the standard library, and a tokenizer trained on it.

Answers are docstrings and the texts of ``pydoc_data.topics``; their lengths vary widely.
"""

import ast
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from torchtune.models.llama3 import Llama3Tokenizer
from torchtune.utils import get_logger

from recipe_utils.embedded.build_once import build_once, changes
from recipe_utils.embedded.byte_pairs import (
    BEGIN,
    END,
    PAD,
    Ranks,
    hugging_face_files,
    ranks_of_tiktoken_file,
    tiktoken_file,
    train_byte_pairs,
)
from recipe_utils.embedded.question_answers import Pairs, pairs_in_file, question_answer_dataset
from recipe_utils.embedded.stdlib_sources import definitions, library_dir, library_sources
from recipe_utils.files import write_atomically

VOCAB_SIZE = 4096
SPECIAL_TOKENS = (
    BEGIN,
    END,
    PAD,
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)

_log = get_logger("INFO")


def docstring_dataset(
    tokenizer: Any,
    path: str,
    split: str = "train",
    num_validation_samples: int = 64,
    train_on_input: bool = False,
    packed: bool = False,
) -> Dataset[dict[str, Any]]:
    """Returns questions about Python's standard library with their answers.

    The first call writes the pairs to the file ``path``. The other arguments are those of
    :func:`recipe_utils.embedded.question_answers.question_answer_dataset`.

    Raises:
        ValueError: unknown split.
    """
    pairs = docstring_pairs(path)
    return question_answer_dataset(
        pairs, tokenizer, split, num_validation_samples, train_on_input, packed
    )


def docstring_pairs(path: str) -> Pairs:
    """Returns all pairs of a JSON file in a fixed order; over 5,500 with Python 3.11.

    Writes the file if it does not exist.
    """
    return pairs_in_file(path, _collect)


def _collect() -> Pairs:
    pairs = [
        (f"What does `{name}` do?", docstring)
        for source in library_sources()
        for name, docstring in _docstrings(source)
    ]
    topics = ast.parse((library_dir() / "pydoc_data" / "topics.py").read_text(encoding="utf-8"))
    assignment = topics.body[-1]
    assert isinstance(assignment, ast.Assign | ast.AnnAssign)
    assert assignment.value is not None
    for topic, text in ast.literal_eval(assignment.value).items():
        pairs.append((f"Explain `{topic}` in Python.", text.strip()))
    return pairs


def _docstrings(source: Path) -> Iterator[tuple[str, str]]:
    """Yields (dotted name, docstring) of the definitions in a file."""
    for name, node in definitions(source):
        docstring = ast.get_docstring(node)
        if docstring and len(docstring) > 20:
            yield name, inspect.cleandoc(docstring)


def docstring_tokenizer(
    path: str,
    docstrings_path: str | None = None,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    copied_from: str | None = None,
) -> Llama3Tokenizer:
    """Returns a Llama 3 tokenizer whose merges are learned from the training text.

    The first call trains it (some seconds) or copies it and writes ``path`` in the format of Llama
    3's ``tokenizer.model``; later calls and other processes read the file. It is rebuilt if
    ``vocab_size``, the text or the copied file change.

    Args:
        path: file of the tokenizer. ``special_tokens.json`` is written beside it, and for
            transformers ``tokenizer.json`` and ``tokenizer_config.json``. Exports contain all of
            them, but not the record of the arguments, and are only read.
        docstrings_path: file of the text to train on, see :func:`docstring_pairs`; None to only
            read or copy.
        vocab_size: number of tokens, including special ones; None for that of the file, or 4096.
        max_seq_len: maximum length of samples [tokens].
        copied_from: file of another model's tokenizer, which is copied instead of trained.

    Raises:
        ValueError: there is no tokenizer to read or copy, and no text to train one on.
    """
    file = Path(path)
    if copied_from is not None:
        _check_there_is("copied_from", copied_from)
        source = Path(copied_from)
        _follow(file, lambda _: {"copied_from": _digest(source)}, lambda _: _read(source))
    elif docstrings_path is not None:
        texts = Path(docstrings_path)

        def made_from(before: Mapping[str, Any]) -> dict[str, Any]:
            docstring_pairs(docstrings_path)
            num_tokens = vocab_size or before.get("vocab_size", VOCAB_SIZE)
            return {"vocab_size": num_tokens, "docstrings_path": _digest(texts)}

        def train(now: Mapping[str, Any]) -> tuple[Ranks, dict[str, int]]:
            text = [
                f"{question}\n\n{answer}" for question, answer in docstring_pairs(docstrings_path)
            ]
            ranks = train_byte_pairs(text, now["vocab_size"] - len(SPECIAL_TOKENS))
            return ranks, {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}

        _follow(file, made_from, train)
    else:
        _check_there_is("path", path)
    with _no_cache_of_tiktoken():
        return Llama3Tokenizer(str(file), _special_tokens_of(file), max_seq_len)


def _check_there_is(argument: str, path: str) -> None:
    if not Path(path).exists():
        raise ValueError(
            f"{argument}={path}: there is no tokenizer; train the model that it belongs to first: "
            "tune run full_finetune_update_step --config llama3_2/5M_full_update_step"
        )


def _follow(
    file: Path,
    made_from: Callable[[Mapping[str, Any]], dict[str, Any]],
    make: Callable[[Mapping[str, Any]], tuple[Ranks, dict[str, int]]],
) -> None:
    """Builds the files of a tokenizer if its arguments have changed.

    Args:
        file: ``tokenizer.model``; the others are beside it.
        made_from: returns the arguments now, given the recorded ones.
        make: returns the tokens and the special tokens, given the arguments.
    """
    record = file.with_name(f".{file.name}.made_from.json")
    for_transformers = file.with_name("tokenizer.json")

    def recorded() -> dict[str, Any]:
        return json.loads(record.read_text()) if record.exists() else {}

    def is_current() -> bool:
        if not record.exists():  # an export
            return True
        before = recorded()
        return for_transformers.exists() and not changes(before, made_from(before))

    def build() -> None:
        before = recorded()
        now = made_from(before)
        changed = changes(before, now)
        if changed:
            _log.info(f"{file}: the tokenizer is made anew, because {changed}")
        if changed or not file.exists():
            ranks, special_tokens = make(now)
            # Written again after all others: a kill in between leaves no current file.
            file.unlink(missing_ok=True)
        else:
            ranks, special_tokens = _read(file)
        write_atomically(record, json.dumps(now))
        write_atomically(_special_tokens_path(file), json.dumps(special_tokens, indent=2))
        for name, content in hugging_face_files(ranks, special_tokens).items():
            write_atomically(file.with_name(name), content)
        write_atomically(file, tiktoken_file(ranks))

    build_once(file, build, is_current)


def _read(file: Path) -> tuple[Ranks, dict[str, int]]:
    return ranks_of_tiktoken_file(file.read_text()), _special_tokens_of(file)


def _special_tokens_path(file: Path) -> Path:
    return file.with_name("special_tokens.json")


def _special_tokens_of(file: Path) -> dict[str, int]:
    special_tokens: dict[str, int] = json.loads(_special_tokens_path(file).read_text())
    return special_tokens


def _digest(path: Path) -> str:
    """Returns a hash of the content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


@contextmanager
def _no_cache_of_tiktoken() -> Iterator[None]:
    """Disables tiktoken's cache, whose key is the path without the content."""
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["TIKTOKEN_CACHE_DIR"]
        else:
            os.environ["TIKTOKEN_CACHE_DIR"] = before
