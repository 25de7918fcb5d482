"""Preference pairs: real sentences, each against itself with two words exchanged."""

import json
import re
from collections import Counter

import pytest
import tiny

from recipe_utils.examples.stdlib_docs import docstring_tokenizer
from recipe_utils.examples.stdlib_preferences import MIN_WORDS, exchange_neighbors, first_paragraphs, word_order_dataset

SIDES = ("chosen", "rejected")


@pytest.fixture(scope="module")
def paragraphs(built):
    return first_paragraphs(built.pairs)


@pytest.fixture(scope="module")
def train(built):
    return word_order_dataset(built.tokenizer, built.path)


@pytest.fixture(scope="module")
def validation(built):
    return word_order_dataset(built.tokenizer, built.path, "validation")


def texts_of(built, sample):
    """Returns (question, chosen, rejected); the targets are the answer and its end."""
    found = []
    for side in SIDES:
        ids, labels = sample[f"{side}_input_ids"], sample[f"{side}_labels"]
        start = next(i for i, label in enumerate(labels) if label != tiny.IGNORE)
        for tokens, role in ((ids[:start], "user"), (ids[start:-1], "assistant")):
            # The tokenizer puts a header and an end around each message.
            header = rf"<\|start_header_id\|>{role}<\|end_header_id\|>\n\n"
            message = rf"{header}((?:(?!<\|start_header_id).)*)<\|eot_id\|>$"
            found.append(re.search(message, built.text_of(tokens), re.S)[1])
    question, chosen, _, rejected = found
    return question, chosen, rejected


@pytest.fixture(scope="module")
def validation_texts(built, validation):
    return [texts_of(built, sample) for sample in validation]


def test_there_are_thousands_of_different_pairs(train, validation, paragraphs):
    assert len(train) > 4000
    assert len(validation) == 200
    assert len(train) + len(validation) == len(paragraphs)
    assert len({answer for _, answer in paragraphs}) == len(paragraphs)


def test_chosen_is_the_first_paragraph_of_the_docstring(built, validation_texts, paragraphs):
    docstrings = dict(built.pairs)
    for question, chosen, _ in validation_texts:
        assert re.fullmatch(r"What does `[\w.]+` do\?", question)
        paragraph = re.split(r"\n\s*\n", docstrings[question])[0]
        assert chosen.split(" ") == paragraph.split()
    chosen = dict(paragraphs)["What does `json.dumps` do?"]
    assert chosen == " ".join(json.dumps.__doc__.split())[: len(chosen)]


def test_rejected_is_chosen_with_two_different_neighbors_exchanged(validation_texts):
    places = Counter()
    for _, chosen, rejected in validation_texts:
        good, bad = chosen.split(" "), rejected.split(" ")
        assert len(good) == len(bad) >= MIN_WORDS
        first, second = [i for i in range(len(good)) if good[i] != bad[i]]
        assert second == first + 1
        assert [good[first], good[second]] == [bad[second], bad[first]]
        places[first] += 1
    assert len(places) > 5
    assert max(places.values()) < len(validation_texts) / 2


def test_no_answer_of_the_validation_split_is_trained_on(built, train, validation_texts):
    trained = {text for sample in train for text in texts_of(built, sample)[1:]}
    assert not trained & {text for texts in validation_texts for text in texts[1:]}


@pytest.mark.slow
def test_no_side_is_truncated_to_the_embedded_model_s_512_tokens(built, tmp_path):
    tokenizer = docstring_tokenizer(str(tmp_path / "tokenizer.model"), built.path)
    dataset = word_order_dataset(tokenizer, built.path)
    assert max(len(sample["chosen_input_ids"]) for sample in dataset) < 512


def test_only_different_words_are_exchanged():
    assert exchange_neighbors("a a b", "any seed") == "a b a"
    # Constant, although each process has another hash seed.
    assert exchange_neighbors("a b c d e f g h", "one") == "a b c d e f h g"
    assert exchange_neighbors("a b c d e f g h", "two") == "a b c e d f g h"
    assert first_paragraphs([("What does `a` do?", "no no no no no")]) == []
