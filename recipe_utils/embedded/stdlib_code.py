"""Code of the standard library's functions, to adapt the embedded model to."""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from recipe_utils.embedded.question_answers import Pairs, pairs_in_file, question_answer_dataset
from recipe_utils.embedded.stdlib_sources import definitions, library_sources

MAX_CHARACTERS = 1000
"""Maximum length of a function's code. With its question this is less than 512 tokens of the
embedded tokenizer."""


def code_dataset(
    tokenizer: Any,
    path: str,
    split: str = "train",
    num_validation_samples: int = 64,
    train_on_input: bool = False,
    packed: bool = False,
) -> Dataset[dict[str, Any]]:
    """Returns names of functions of Python's standard library as questions, with their code as answers.

    The first call writes the pairs to the file ``path``; over 7,000 with Python 3.11 to 3.13. The
    other arguments are those of
    :func:`recipe_utils.embedded.question_answers.question_answer_dataset`.
    """
    pairs = pairs_in_file(path, code_pairs)
    return question_answer_dataset(
        pairs, tokenizer, split, num_validation_samples, train_on_input, packed
    )


def code_pairs() -> Pairs:
    """Returns all pairs in a fixed order."""
    return [
        (f"Write `{name}`.", code)
        for source in library_sources()
        for name, code in _functions(source)
        if len(code) <= MAX_CHARACTERS
    ]


def _functions(source: Path) -> Iterator[tuple[str, str]]:
    """Yields (dotted name, code without docstring) of functions with a body besides the docstring."""
    lines = source.read_text(encoding="utf-8", errors="replace").split("\n")  # as ast counts them
    for name, node in definitions(source):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        start = min(each.lineno for each in [node, *node.decorator_list]) - 1
        code = lines[start : node.end_lineno]
        if ast.get_docstring(node) is not None:
            docstring, *body = node.body
            if not body:
                continue
            del code[docstring.lineno - 1 - start : (docstring.end_lineno or 0) - start]
        yield name, textwrap.dedent("\n".join(code))
