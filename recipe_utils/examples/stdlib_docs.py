"""Data of the embedded default: questions about the standard library, and a tokenizer trained on it.

Answers are docstrings and the texts of ``pydoc_data.topics``; their lengths vary widely.
"""

import ast
import base64
import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

from torchtune.models.llama3 import Llama3Tokenizer

from recipe_utils.examples.build_once import WEIGHTS, build_once
from recipe_utils.examples.byte_pairs import BEGIN, END, PAD, hugging_face_files, train_byte_pairs
from recipe_utils.examples.question_answers import Pairs, dataset_of, pairs_in_file
from recipe_utils.examples.stdlib_sources import LIBRARY_DIR, definitions, library_sources
from recipe_utils.files import write_atomically

SPECIAL_TOKENS = (
    BEGIN, END, PAD, "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
    "<|eot_id|>", "<|python_tag|>", "<|image|>",
)  # fmt: skip


def docstring_pairs(path: str) -> Pairs:
    """Returns all pairs of a JSON file in a fixed order; over 5,500 with Python 3.11.

    Writes the file if it does not exist.
    """
    return pairs_in_file(path, _collect)


def _collect() -> Pairs:
    pairs = []
    for source in library_sources():
        for name, node in definitions(source):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) > 20:
                pairs.append((f"What does `{name}` do?", inspect.cleandoc(docstring)))
    topics = ast.parse((LIBRARY_DIR / "pydoc_data" / "topics.py").read_text(encoding="utf-8"))
    assignment = topics.body[-1]
    assert isinstance(assignment, ast.Assign | ast.AnnAssign)
    assert assignment.value is not None
    for topic, text in ast.literal_eval(assignment.value).items():
        pairs.append((f"Explain `{topic}` in Python.", text.strip()))
    return pairs


docstring_dataset = dataset_of("docstring_dataset", _collect)
"""Questions about Python's standard library with their answers."""


_BESIDE = ("special_tokens.json", "tokenizer.json", "tokenizer_config.json")
"""Files that are written beside a tokenizer."""


def docstring_tokenizer(
    path: str,
    docstrings_path: str | None = None,
    vocab_size: int = 4096,
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
        docstrings_path: file of the text to train on, see :func:`docstring_pairs`; None to only read or copy.
        vocab_size: number of tokens, including special ones, if it is trained.
        max_seq_len: maximum length of samples [tokens].
        copied_from: file of another model's tokenizer, which is copied instead of trained.

    Raises:
        ValueError: there is no tokenizer to read or copy and no text, or another model is in the folder.
    """
    file = Path(path)
    record = file.with_name(f".{file.name}.made_from.json")
    special_tokens_file = file.with_name("special_tokens.json")
    made_from: dict[str, Any] = {}
    if copied_from is not None:
        _check_exists("copied_from", copied_from)
        made_from = {"copied_from": digest_of(copied_from)}
    elif docstrings_path is not None:
        pairs = docstring_pairs(docstrings_path)
        made_from = {"vocab_size": vocab_size, "docstrings_path": digest_of(docstrings_path)}
    else:
        _check_exists("path", path)

    # Without arguments, the file is one of an export, which is only read.
    def recorded() -> dict[str, Any] | None:
        return json.loads(record.read_text()) if made_from and record.exists() else None

    def build() -> None:
        if copied_from is not None:
            source = Path(copied_from)
            contents = {name: source.with_name(name).read_text() for name in _BESIDE}
            tiktoken = source.read_text()
        else:
            texts = (f"{question}\n\n{answer}" for question, answer in pairs)
            ranks = train_byte_pairs(texts, vocab_size - len(SPECIAL_TOKENS))
            special_tokens = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
            contents = hugging_face_files(ranks, special_tokens)
            contents[special_tokens_file.name] = json.dumps(special_tokens, indent=2)
            tiktoken = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
        write_atomically(record, json.dumps(made_from))
        for name, content in contents.items():
            write_atomically(file.with_name(name), content)
        write_atomically(file, tiktoken)

    is_other = lambda other: other.name in _BESIDE or WEIGHTS.fullmatch(other.name)  # noqa: E731
    build_once(file, build, made_from, recorded, lambda other: not record.exists() and bool(is_other(other)))
    # tiktoken's cache would return the previous file of this path.
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    special_tokens = json.loads(special_tokens_file.read_text())
    return Llama3Tokenizer(str(file), special_tokens, max_seq_len)


def _check_exists(argument: str, path: str) -> None:
    if not Path(path).exists():
        raise ValueError(
            f"{argument}={path}: there is no tokenizer; train the model that it belongs to first: "
            "tune run full_finetune_update_step --config llama3_2/5M_full_update_step"
        )


def digest_of(path: str) -> str:
    """Returns a hash of a file's content."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
