"""Code of the standard library's functions, to adapt the embedded model to."""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

from recipe_utils.examples.question_answers import Pairs, dataset_of
from recipe_utils.examples.stdlib_sources import definitions, library_sources

MAX_CHARACTERS = 1000
"""Maximum length of a function's code. With its question this is less than 512 tokens of the embedded tokenizer."""


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
        start = min(part.lineno for part in [node, *node.decorator_list]) - 1
        code = lines[start : node.end_lineno]
        if ast.get_docstring(node) is not None:
            docstring, *body = node.body
            if not body:
                continue
            del code[docstring.lineno - 1 - start : (docstring.end_lineno or 0) - start]
        yield name, textwrap.dedent("\n".join(code))


code_dataset = dataset_of("code_dataset", code_pairs)
"""Names of functions of Python's standard library as questions, with their code as answers: over
7,000 with Python 3.11 to 3.13."""
