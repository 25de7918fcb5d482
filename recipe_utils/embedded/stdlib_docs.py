"""The embedded default's data: real text that every Python carries, and a tokenizer trained on it.

Thousands of question/answer samples from the docstrings of the standard library and from
``pydoc_data.topics``, of very different length, without a download.
"""

import ast
import base64
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from torchtune.models.llama3 import Llama3Tokenizer
from torchtune.models.llama3._tokenizer import CL100K_PATTERN

from recipe_utils.embedded.build_once import build_once, write_whole
from recipe_utils.embedded.question_answers import Pairs, pairs_in_file, question_answer_dataset
from recipe_utils.embedded.stdlib_sources import definitions, library_dir, library_sources

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
    pairs = docstring_pairs(path)
    return question_answer_dataset(
        pairs, tokenizer, split, num_validation_samples, train_on_input, packed
    )


def docstring_pairs(path: str) -> Pairs:
    """All (question, answer) pairs, in a fixed order; over 5,500 with Python 3.11.

    Args:
        path: JSON file that holds them; it is written first if it does not exist.
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
    """(dotted name, docstring) of what a file defines."""
    for name, node in definitions(source):
        docstring = ast.get_docstring(node)
        if docstring and len(docstring) > 20:
            yield name, inspect.cleandoc(docstring)


def docstring_tokenizer(
    path: str,
    docstrings_path: str | None = None,
    vocab_size: int = 4096,
    max_seq_len: int | None = None,
    copied_from: str | None = None,
) -> Llama3Tokenizer:
    """A Llama 3 tokenizer whose byte-pair merges are learned from the training text.

    The first call trains it, some seconds, or copies another model's, and writes it to ``path`` in the
    format of Llama 3's own ``tokenizer.model``; later calls and other processes read it from there.

    Args:
        path: the tokenizer's file; its special tokens are written beside it as
            ``special_tokens.json``.
        docstrings_path: file of the text to train on, see :func:`docstring_pairs`; None only reads or copies.
        vocab_size: tokens in all, the special ones included; read from the file if that is there.
        max_seq_len: samples are truncated to it [tokens].
        copied_from: the file of another model, which has the same tokens; instead of training one.

    Raises:
        ValueError: there is no tokenizer to read or to copy, and no text to train one on.
    """
    if copied_from is not None:
        _check_there_is("copied_from", copied_from)
    elif docstrings_path is None:
        _check_there_is("path", path)
    special_tokens_path = Path(path).with_name("special_tokens.json")

    def copy() -> None:
        assert copied_from is not None
        source = Path(copied_from)
        special_tokens_path.write_text(source.with_name(special_tokens_path.name).read_text())
        write_whole(Path(path), source.read_text())

    def train() -> None:
        assert docstrings_path is not None
        ranks = _train_byte_pairs(
            docstring_pairs(docstrings_path), vocab_size - len(SPECIAL_TOKENS)
        )
        special_tokens = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        special_tokens_path.write_text(json.dumps(special_tokens, indent=2))
        lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
        write_whole(Path(path), "\n".join(lines) + "\n")

    build_once(Path(path), train if copied_from is None else copy)
    return Llama3Tokenizer(
        path=str(path),
        special_tokens=json.loads(special_tokens_path.read_text()),
        max_seq_len=max_seq_len,
    )


def _check_there_is(argument: str, path: str) -> None:
    if not Path(path).exists():
        raise ValueError(
            f"{argument}={path}: there is no tokenizer; train the model that it belongs to first: "
            "tune run full_finetune_update_step --config llama3_2/5M_full_update_step"
        )


def _train_byte_pairs(pairs: Pairs, num_tokens: int) -> dict[bytes, int]:
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
