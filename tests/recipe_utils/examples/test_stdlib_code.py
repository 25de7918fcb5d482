"""Code of the standard library's functions, which the embedded model takes whole."""

import ast
import inspect
import shlex

import pytest

from recipe_utils.examples.stdlib_code import code_dataset, code_pairs
from recipe_utils.examples.stdlib_docs import docstring_tokenizer


@pytest.fixture(scope="module")
def pairs():
    return code_pairs()


def test_there_are_thousands_of_different_functions_without_their_docstrings(pairs):
    assert len(pairs) > 6000
    assert len(set(pairs)) == len(pairs)
    for question, code in pairs:
        # A few contain lines of text that are indented less, and stay indented themselves.
        body = ast.parse(f"if True:\n{code}" if code.startswith(" ") else code).body[0]
        function = body.body[0] if isinstance(body, ast.If) else body
        assert question.endswith(f".{function.name}`.") or function.name in question
        assert ast.get_docstring(function) is None, question


def test_they_are_those_of_the_running_python_with_their_decorators(pairs):
    answers = dict(pairs)
    code = inspect.getsource(shlex.join)
    (docstring,) = [line for line in code.splitlines() if '"""' in line]
    assert answers["Write `shlex.join`."] == code.replace(f"{docstring}\n", "").rstrip()
    assert answers["Write `fractions.Fraction.numerator`."].startswith("@property\ndef numerator(")


@pytest.mark.slow
def test_no_sample_exceeds_512_tokens_of_the_embedded_tokenizer(tmp_path, built):
    tokenizer = docstring_tokenizer(str(tmp_path / "tokenizer.model"), built.path)
    path = str(tmp_path / "code.json")
    assert max(len(sample["tokens"]) for sample in code_dataset(tokenizer, path)) <= 512
