"""The embedded preferences: real sentences, each against itself with two words exchanged, as torchtune's pairs."""

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import tiny
from torchtune.data import Message
from torchtune.datasets import PreferenceDataset

from recipe_utils.embedded.stdlib_docs import docstring_pairs, docstring_tokenizer
from recipe_utils.embedded.stdlib_preferences import (
    MIN_WORDS,
    exchange_neighbours,
    first_paragraphs,
    word_order_dataset,
)

SIDES = ("chosen", "rejected")


class Built:
    def __init__(self, folder):
        self.path = str(folder / "docstrings.json")
        self.docstrings = dict(docstring_pairs(self.path))
        self.tokenizer = docstring_tokenizer(str(folder / "tokenizer.model"), self.path, 1024)
        self.train, self.validation = self.splits()

    def splits(self, **options):
        return [
            word_order_dataset(self.tokenizer, self.path, split, **options)
            for split in ("train", "validation")
        ]

    def message(self, tokens):
        """(role, text) of the last message."""
        text = self.tokenizer.decode(list(tokens), truncate_at_eos=False, skip_special_tokens=False)
        # The tokenizer puts a header and an end around each message.
        header = r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n"
        return re.search(
            rf"{header}((?:(?!<\|start_header_id).)*)<\|eot_id\|>$", text, re.S
        ).groups()

    def texts(self, sample):
        """(question, chosen, rejected) of a sample; its targets are answers, what is before is the question."""
        answers = []
        for side in SIDES:
            ids, labels = sample[f"{side}_input_ids"], sample[f"{side}_labels"]
            start = next(i for i, label in enumerate(labels) if label != tiny.IGNORE)
            role, answer = self.message(ids[start:-1])
            assert role == "assistant"
            answers.append(answer)
            role, question = self.message(ids[:start])
            assert role == "user"
        return question, *answers


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return Built(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def validation_texts(built):
    return [built.texts(sample) for sample in built.validation]


def test_there_are_thousands_of_pairs_of_which_none_comes_twice(built):
    assert len(built.train) > 4000
    assert len(built.validation) == 200
    answers = first_paragraphs(docstring_pairs(built.path))
    assert len(built.train) + len(built.validation) == len(answers)
    assert len({answer for _, answer in answers}) == len(answers)


def test_chosen_is_the_first_paragraph_of_the_docstring_that_is_asked_for(built, validation_texts):
    for question, chosen, _ in validation_texts:
        assert re.fullmatch(r"What does `[\w.]+` do\?", question)
        paragraph = re.split(r"\n\s*\n", built.docstrings[question])[0]
        assert chosen.split(" ") == paragraph.split()


def test_chosen_is_of_the_python_that_runs(built):
    answers = dict(first_paragraphs(docstring_pairs(built.path)))
    chosen = answers["What does `json.dumps` do?"]
    assert chosen == " ".join(json.dumps.__doc__.split())[: len(chosen)]


def test_rejected_is_chosen_with_two_different_neighbours_exchanged(validation_texts):
    places = Counter()
    for _, chosen, rejected in validation_texts:
        good, spoilt = chosen.split(" "), rejected.split(" ")
        assert len(good) == len(spoilt) >= MIN_WORDS
        first, second = [
            i for i, (one, other) in enumerate(zip(good, spoilt, strict=True)) if one != other
        ]
        assert second == first + 1
        assert good[first : second + 1] == spoilt[second : first - 1 if first else None : -1]
        places[first] += 1
    assert len(places) > 5
    assert max(places.values()) < len(validation_texts) / 2


def test_both_sides_share_the_prompt_and_no_token_of_it_is_a_target(built):
    for sample in built.validation:
        starts = []
        for side in SIDES:
            ids, labels = sample[f"{side}_input_ids"], sample[f"{side}_labels"]
            start = next(i for i, label in enumerate(labels) if label != tiny.IGNORE)
            assert labels[start:-1] == ids[start:-1]  # nothing of the answer is left out
            starts.append(ids[:start])
        assert starts[0] == starts[1]


def test_samples_are_those_of_torchtune_s_preference_dataset(built, tmp_path):
    pytest.importorskip("datasets")
    rows = [
        dict(zip(("question", *SIDES), built.texts(built.train[i]), strict=True)) for i in range(20)
    ]
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(rows))

    def messages(row):
        return {
            side: [
                Message(role="user", content=row["question"], masked=True),
                Message(role="assistant", content=row[side], masked=False),
            ]
            for side in SIDES
        }

    expected = PreferenceDataset(
        source="json",
        data_files=str(path),
        split="train",
        message_transform=messages,
        tokenizer=built.tokenizer,
    )
    assert [built.train[i] for i in range(20)] == list(expected)


def test_no_held_out_answer_is_trained_on(built, validation_texts):
    trained = [built.texts(sample) for sample in built.train]
    assert not {chosen for _, chosen, _ in trained} & {chosen for _, chosen, _ in validation_texts}
    assert not {rejected for *_, rejected in trained} & {
        rejected for *_, rejected in validation_texts
    }


def test_another_size_of_the_validation_split_is_the_beginning_of_the_same_order(built):
    train, validation = built.splits(num_validation_samples=30)
    assert len(train) == len(built.train) + 170
    assert [validation[i] for i in range(30)] == [built.validation[i] for i in range(30)]


@pytest.mark.slow
def test_another_process_with_another_hash_seed_makes_the_same_pairs(built):
    program = """
import sys
from recipe_utils.embedded.stdlib_docs import docstring_pairs
from recipe_utils.embedded.stdlib_preferences import exchange_neighbours, first_paragraphs
for question, answer in first_paragraphs(docstring_pairs(sys.argv[1]))[::100]:
    print(question, exchange_neighbours(answer, question))
"""
    here = "".join(
        f"{question} {exchange_neighbours(answer, question)}\n"
        for question, answer in first_paragraphs(docstring_pairs(built.path))[::100]
    )
    for hash_seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", program, built.path],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout == here


@pytest.mark.slow
def test_no_side_is_truncated_to_the_embedded_model_s_512_tokens(built, tmp_path):
    tokenizer = docstring_tokenizer(str(tmp_path / "tokenizer.model"), built.path)
    longest = max(len(answer) for _, answer in first_paragraphs(docstring_pairs(built.path)))
    assert longest < 2000
    lengths = [
        len(sample["chosen_input_ids"]) for sample in word_order_dataset(tokenizer, built.path)
    ]
    assert max(lengths) < 512


def test_equal_words_are_never_exchanged():
    assert exchange_neighbours("a a b", "any seed") == "a b a"


def test_what_has_no_two_different_words_is_left_out_or_refused():
    assert first_paragraphs([("What does `a` do?", "no no no no no")]) == []
    with pytest.raises(ValueError, match="no two words are different"):
        exchange_neighbours("no no", "any seed")


def test_an_unknown_split_is_refused(built):
    with pytest.raises(ValueError, match="split=test: unknown"):
        word_order_dataset(built.tokenizer, built.path, "test")
