"""The second embedded text: code of the library that runs, which the embedded tokenizer does not have to cut."""

import ast
import inspect
import shlex

import pytest

from recipe_utils.embedded.stdlib_code import MAX_CHARACTERS, code_dataset, code_pairs
from recipe_utils.embedded.stdlib_docs import docstring_tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tmp_path_factory.mktemp("code") / "code.json")


@pytest.fixture(scope="module")
def pairs(path):
    return code_pairs(path)


def test_there_are_thousands_of_different_functions_without_their_docstrings(pairs):
    assert len(pairs) > 6000
    assert len(set(pairs)) == len(pairs)
    for question, code in pairs:
        # A few have lines of text that begin further left than they do, and stay indented.
        body = ast.parse(f"if True:\n{code}" if code.startswith(" ") else code).body[0]
        function = body.body[0] if isinstance(body, ast.If) else body
        assert question.endswith(f".{function.name}`.") or function.name in question
        assert ast.get_docstring(function) is None, question


def test_they_are_those_of_the_python_that_runs(pairs):
    answers = dict(pairs)
    code = inspect.getsource(shlex.join)
    (docstring,) = [line for line in code.splitlines() if '"""' in line]
    assert answers["Write `shlex.join`."] == code.replace(f"{docstring}\n", "").rstrip()


def test_decorators_stay_and_methods_begin_at_the_left(pairs):
    answers = dict(pairs)
    assert answers["Write `fractions.Fraction.numerator`."].startswith("@property\ndef numerator(")


def test_they_are_collected_once_and_read_again_equal(path, pairs):
    assert code_pairs(path) == pairs


@pytest.mark.slow
def test_the_embedded_model_takes_the_longest_ones_whole(tmp_path, path, pairs):
    docstrings_path = str(tmp_path / "docstrings.json")
    tokenizer = docstring_tokenizer(str(tmp_path / "tokenizer.model"), docstrings_path)
    assert max(len(code) for _, code in pairs) <= MAX_CHARACTERS
    assert max(len(sample["tokens"]) for sample in code_dataset(tokenizer, path)) <= 512


def test_validation_shares_no_sample_with_train(path, pairs):
    class Words:
        def __call__(self, sample, inference=False):
            tokens = [hash(message.text_content) for message in sample["messages"]]
            return {"tokens": tokens, "mask": [message.masked for message in sample["messages"]]}

    train, validation = (
        {tuple(sample["tokens"]) for sample in code_dataset(Words(), path, split)}
        for split in ("train", "validation")
    )
    assert len(validation) == 64
    assert len(train) + len(validation) == len(pairs)
    assert not train & validation


def test_an_unknown_split_is_refused(path):
    with pytest.raises(ValueError, match="split=test: unknown"):
        code_dataset(None, path, "test")
