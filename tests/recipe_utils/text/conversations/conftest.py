import json

import pytest
from chats import TOOL_CHATML, targets, tokenizer_of

from recipe_utils.text import conversation_dataset


@pytest.fixture
def write(tmp_path):
    """Writes rows as lines of JSON; returns the path."""

    def write(*rows, name="rows.jsonl"):
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(tmp_path / name)

    return write


@pytest.fixture
def read(tmp_path, write):
    """Returns the whole text of a row and its targets, as a template prints and trains them."""

    def read(row, template=TOOL_CHATML, **options):
        tokenizer = tokenizer_of(tmp_path / "folder", template)
        (sample,) = conversation_dataset(tokenizer, write(row), **options)
        return tokenizer.decode(sample["tokens"], skip_special_tokens=False), targets(tokenizer, sample)

    return read
