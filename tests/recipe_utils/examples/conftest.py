import os
from types import SimpleNamespace

import pytest

from recipe_utils.examples.stdlib_docs import docstring_pairs, docstring_tokenizer


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Returns pairs of docstrings, and a tokenizer of 1024 tokens, which are trained sooner than 4096."""
    folder = tmp_path_factory.mktemp("docstrings")
    path, tokenizer_path = str(folder / "docstrings.json"), folder / "new" / "tokenizer.model"
    pairs = docstring_pairs(path)
    tokenizer = docstring_tokenizer(str(tokenizer_path), path, 1024)

    def text_of(tokens):
        return tokenizer.decode(list(tokens), truncate_at_eos=False, skip_special_tokens=False)

    return SimpleNamespace(path=path, pairs=pairs, tokenizer_path=tokenizer_path, tokenizer=tokenizer, text_of=text_of)


@pytest.fixture
def interrupted_at(monkeypatch):
    """Calls a function and leaves the files that a kill at the rename to ``name`` would leave."""

    def call(name, function, *arguments, **options):
        replace = os.replace

        def replace_until(source, target):
            if target.name == name:
                raise KeyboardInterrupt
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace_until)
            with pytest.raises(KeyboardInterrupt):
                function(*arguments, **options)

    return call
