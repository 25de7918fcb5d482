"""Embedded conversations: thinking is a target in the last turn, and dropped from the history."""

import json

import pytest

from recipe_utils.examples.stdlib_conversations import conversation_dataset, conversation_tokenizer

IGNORE = -100


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns folder and tokenizer."""
    folder = tmp_path_factory.mktemp("conversations")
    text = str(folder / "docstrings.json")
    return folder, text, conversation_tokenizer(str(folder / "fresh" / "tokenizer.model"), text)


def test_a_turn_has_the_thinking_of_the_last_answer_only(made):
    folder, text, tokenizer = made
    path = folder / "val.jsonl"
    given = {"split": "validation", "num_validation_samples": 8, "split_turns": True}
    turns = conversation_dataset(tokenizer, str(path), text, **given)
    conversations = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert len(conversations) == 8
    assert len(turns) == sum(len(messages) // 2 for messages in conversations) > 24
    expected = [messages[i] for messages in conversations for i in range(1, len(messages), 2)]
    for sample, answer in zip(map(turns.__getitem__, range(len(turns))), expected, strict=True):
        targets = tokenizer.tokenizer.decode([t for t in sample["labels"] if t != IGNORE])
        thinking = f"<think>\n{answer['reasoning_content']}\n</think>\n\n"
        assert targets == f"{thinking}{answer['content']}<|eot_id|>"
        assert tokenizer.tokenizer.decode(sample["tokens"]).count("<think>") == targets.count("<think>")


def test_splits_have_different_conversations_and_another_split_is_refused(made):
    folder, text, tokenizer = made
    for split in ("train", "validation"):
        conversation_dataset(tokenizer, str(folder / split), text, split)
    found = [set((folder / split).read_text().splitlines()) for split in ("train", "validation")]
    assert (len(found[0]) > 400, len(found[1])) == (True, 32)
    assert not found[0] & found[1]
    with pytest.raises(ValueError, match="split=test: unknown"):
        conversation_dataset(tokenizer, str(folder / "test"), text, "test")
