"""The embedded data: thousands of real texts, a tokenizer that keeps them, two disjoint splits."""

import json
import re

import pytest
import tiny

from recipe_utils.data.vocabulary import check_same_tokens
from recipe_utils.embedded.build_once import build_once
from recipe_utils.embedded.stdlib_docs import (
    docstring_dataset,
    docstring_pairs,
    docstring_tokenizer,
)

VOCAB_SIZE = 1024  # less than the embedded default's: quicker to train


class Built:
    def __init__(self, folder):
        self.pairs_path = folder / "docstrings.json"
        self.pairs = docstring_pairs(str(self.pairs_path))
        self.tokenizer_path = folder / "new" / "tokenizer.model"
        self.tokenizer = self.load_tokenizer()

    def load_tokenizer(self, **options):
        return docstring_tokenizer(
            str(self.tokenizer_path), str(self.pairs_path), VOCAB_SIZE, **options
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return Built(tmp_path_factory.mktemp("docstrings"))


def text_of(built, tokens):
    return built.tokenizer.decode(list(tokens), truncate_at_eos=False, skip_special_tokens=False)


def test_there_are_thousands_of_pairs_of_very_different_length(built):
    assert len(built.pairs) > 3000
    lengths = sorted(len(answer) for _, answer in built.pairs)
    assert lengths[0] > 0
    assert lengths[-1] > 20 * lengths[len(lengths) // 2]
    assert all(question.strip() for question, _ in built.pairs)


def test_pairs_are_those_of_the_python_that_runs(built):
    answers = dict(built.pairs)
    assert answers["What does `json.dumps` do?"].startswith(json.dumps.__doc__.strip()[:40])


def test_no_pair_comes_twice(built):
    assert len(set(built.pairs)) == len(built.pairs)


def test_pairs_are_collected_once_and_read_again_equal(built):
    written = built.pairs_path.stat().st_mtime_ns
    assert docstring_pairs(str(built.pairs_path)) == built.pairs
    assert built.pairs_path.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "text",
    ["", " ", "x = {'a': [1, 2]}\n\n\tdef f():  # ok", "naïve — 你好 🐍\r\n\0", "<|eot_id|>"],
)
def test_the_tokenizer_keeps_any_text(built, text):
    tokens = built.tokenizer.encode(text, add_bos=True, add_eos=True)
    assert text_of(built, tokens[1:-1]) == text


def test_the_tokenizer_keeps_the_answers_in_far_fewer_tokens_than_bytes(built):
    answers = [answer for _, answer in built.pairs[::40]]
    num_tokens = 0
    for answer in answers:
        tokens = built.tokenizer.encode(answer, add_bos=False, add_eos=False)
        assert text_of(built, tokens) == answer
        assert max(tokens) < VOCAB_SIZE
        num_tokens += len(tokens)
    assert num_tokens < 0.5 * sum(len(answer.encode()) for answer in answers)


def test_the_vocabulary_is_as_large_as_asked_for_with_the_special_tokens_in_it(built):
    specials = built.tokenizer.special_tokens.values()
    assert len(set(specials)) == len(specials)
    assert max(specials) == VOCAB_SIZE - 1
    assert built.tokenizer.pad_id in specials


def test_the_tokenizer_is_trained_once_and_read_again_equal(built):
    written = built.tokenizer_path.stat().st_mtime_ns
    again = built.load_tokenizer(max_seq_len=7)
    assert built.tokenizer_path.stat().st_mtime_ns == written
    for _, answer in built.pairs[:20]:
        assert again.encode(answer) == built.tokenizer.encode(answer)
    assert again.special_tokens == built.tokenizer.special_tokens
    assert again.max_seq_len == 7


def test_where_there_is_no_tokenizer_and_no_text_to_train_one_on_the_error_says_what_makes_one(
    tmp_path,
):
    path = tmp_path / "epoch_0" / "tokenizer.model"
    with pytest.raises(ValueError, match=r"there is no tokenizer.*5M_full_update_step"):
        docstring_tokenizer(str(path))
    assert not path.parent.exists()


def test_a_copied_tokenizer_has_the_same_tokens_and_lies_beside_its_own_model(built, tmp_path):
    path = tmp_path / "fresh" / "tokenizer.model"
    copy = docstring_tokenizer(str(path), copied_from=str(built.tokenizer_path), max_seq_len=7)
    for name in ("tokenizer.model", "special_tokens.json"):
        assert path.with_name(name).read_text() == built.tokenizer_path.with_name(name).read_text()
    assert check_same_tokens(copy, built.tokenizer, None) is None
    assert copy.max_seq_len == 7


def test_where_there_is_none_to_copy_the_error_says_what_makes_one_also_beside_an_older_copy(
    built, tmp_path
):
    path, missing = tmp_path / "fresh" / "tokenizer.model", tmp_path / "epoch_0" / "tokenizer.model"
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^copied_from=.*no tokenizer.*5M_full_update_step"):
            docstring_tokenizer(str(path), copied_from=str(missing))
        docstring_tokenizer(str(path), copied_from=str(built.tokenizer_path))


def splits(built, **options):
    return [
        docstring_dataset(built.tokenizer, str(built.pairs_path), split, **options)
        for split in ("train", "validation")
    ]


def test_train_and_validation_share_no_sample_and_are_all_pairs(built):
    train, validation = splits(built, num_validation_samples=500)
    assert len(validation) == 500
    assert len(train) + len(validation) == len(built.pairs)
    texts = [
        {text_of(built, sample["tokens"]) for sample in dataset} for dataset in (train, validation)
    ]
    assert not texts[0] & texts[1]


def test_splits_are_the_same_each_time(built):
    first, second = splits(built)[1], splits(built)[1]
    assert [sample["tokens"] for sample in first] == [sample["tokens"] for sample in second]


def test_only_the_answer_is_a_target_unless_asked_otherwise(built):
    answers = {answer.strip() for _, answer in built.pairs}
    _, validation = splits(built)
    _, with_input = splits(built, train_on_input=True)
    for masked, unmasked in zip(validation, with_input, strict=True):
        assert masked["tokens"] == unmasked["tokens"]
        targets = text_of(built, [label for label in masked["labels"] if label != tiny.IGNORE])
        # The tokenizer puts a header and an end around each message.
        answer = re.fullmatch(
            r"<\|start.*assistant<\|end_header_id\|>(.*)<\|eot_id\|>", targets, re.S
        )
        assert answer[1].strip() in answers
        num_ignored = [list(s["labels"]).count(tiny.IGNORE) for s in (masked, unmasked)]
        assert num_ignored[1] < num_ignored[0] < len(masked["labels"])


def test_packed_rows_are_as_long_as_the_model_takes(built):
    tokenizer = built.load_tokenizer(max_seq_len=256)
    rows = docstring_dataset(tokenizer, str(built.pairs_path), "validation", packed=True)
    assert all(len(row["tokens"]) == 256 for row in rows)
    assert len(rows) < 64


def test_an_unknown_split_is_refused(built):
    with pytest.raises(ValueError, match="split=test: unknown"):
        docstring_dataset(built.tokenizer, str(built.pairs_path), "test")


def test_what_failed_to_build_is_built_again_and_what_is_there_is_not(tmp_path):
    path, calls = tmp_path / "new" / "file", []

    def build():
        calls.append(path.exists())
        if len(calls) == 1:
            raise OSError("disk full")
        path.write_text("whole")

    with pytest.raises(OSError, match="disk full"):
        build_once(path, build)
    for _ in range(3):
        build_once(path, build)
    assert calls == [False, False]
