"""The embedded data: thousands of real texts, a tokenizer that keeps them, two disjoint splits."""

import json
import os
import re
import signal
import sys

import pytest
import tiny
from distributed_runs import fork_context
from recipe_runs import keep_messages
from torchtune.data import Message

from recipe_utils.embedded.build_once import build_once
from recipe_utils.embedded.stdlib_docs import (
    docstring_dataset,
    docstring_pairs,
    docstring_tokenizer,
)
from recipe_utils.model.frozen.vocabulary import check_same_tokens

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


@pytest.fixture(scope="module")
def hugging_face(built):
    transformers = pytest.importorskip("transformers")
    # What AutoTokenizer goes by in an export.
    built.tokenizer_path.with_name("config.json").write_text('{"model_type": "llama"}')
    return transformers.AutoTokenizer.from_pretrained(built.tokenizer_path.parent)


def test_transformers_gives_the_same_ids_and_the_text_back(built, hugging_face):
    texts = [text for pair in built.pairs[::3] for text in pair]
    texts += [
        "", " ", "\n", "  \n\n\t x", "def f(x):\n    return {'a': [1, 2]}  # ok\r\n", "naïve — 你好 🐍\0",
        "1234567890", "aaaaaaaaaaaaaaaaaaaaaaa", "========", "'LL don't", "\u00a0\u2028é\u0301",
    ]  # fmt: skip
    for text in texts:
        ids = hugging_face(text, add_special_tokens=False).input_ids
        assert ids == built.tokenizer.encode(text, add_bos=False, add_eos=False)
        assert hugging_face.decode(ids) == text
    assert hugging_face("a").input_ids == built.tokenizer.encode("a", add_eos=False)
    assert len(hugging_face) == VOCAB_SIZE
    assert hugging_face.get_added_vocab() == built.tokenizer.special_tokens
    names = ("bos", "eos", "pad")
    ids = [getattr(built.tokenizer, f"{name}_id") for name in names]
    assert [getattr(hugging_face, f"{name}_token_id") for name in names] == ids


def test_transformers_template_gives_the_ids_that_are_trained_and_asked_with(built, hugging_face):
    said = [("user", " What does `os` do?\n"), ("assistant", "It  does\n\nmuch.")]
    messages = [Message(role=role, content=text) for role, text in said]
    chat = [{"role": role, "content": text} for role, text in said]
    whole = hugging_face.apply_chat_template(chat, return_dict=False)
    assert whole == built.tokenizer.tokenize_messages(messages)[0]
    asked = hugging_face.apply_chat_template(
        chat[:1], add_generation_prompt=True, return_dict=False
    )
    question = [messages[0], Message(role="assistant", content="")]
    assert asked == built.tokenizer.tokenize_messages(question, add_end_tokens=False)[0]


@pytest.fixture
def made(built, tmp_path):
    """A folder with a copy of the texts, whose tokenizer is quick to make."""
    texts = [pair for pair in built.pairs if len(pair[1]) < 60]
    (tmp_path / "docstrings.json").write_text(json.dumps(texts[:50]))
    return tmp_path


def make_tokenizer(folder, vocab_size=300, **options):
    options = {"docstrings_path": str(folder / "docstrings.json"), **options}
    return docstring_tokenizer(
        str(folder / "fresh/tokenizer.model"), vocab_size=vocab_size, **options
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_tokenizer_follows_the_size_of_the_vocabulary_and_the_texts(made):
    make_tokenizer(made)
    with keep_messages() as messages:
        assert make_tokenizer(made, 280).vocab_size == 280
        small = contents(made / "fresh")
        (made / "docstrings.json").write_text(json.dumps([["zzqj" * 20, "zzqj " * 20]]))
        other = make_tokenizer(made, 280)
    assert len(other.encode("zzqjzzqj", add_bos=False, add_eos=False)) == 1
    now = contents(made / "fresh")
    for name in ("tokenizer.model", "tokenizer.json"):
        assert now[name] != small[name]
    assert "made anew, because vocab_size is 280 and was 300" in messages[0]
    assert re.search(r"made anew, because docstrings_path is \w+ and was \w+$", messages[1])
    assert len(messages) == 2


def test_a_copied_tokenizer_follows_the_one_that_it_is_copied_from(made, tmp_path):
    make_tokenizer(made)
    source = str(made / "fresh/tokenizer.model")
    path = tmp_path / "student" / "tokenizer.model"
    docstring_tokenizer(str(path), copied_from=source)
    changed = make_tokenizer(made, 290)
    assert docstring_tokenizer(str(path), copied_from=source).vocab_size == changed.vocab_size
    for name in ("tokenizer.model", "tokenizer.json", "special_tokens.json"):
        assert path.with_name(name).read_bytes() == contents(made / "fresh")[name]


def test_of_files_that_were_copied_from_where_they_were_made_none_is_changed_or_added(made):
    """As torchtune copies them into exports, without those that begin with a dot."""
    make_tokenizer(made)
    export = made / "epoch_0"
    export.mkdir()
    for path in (made / "fresh").iterdir():
        if not path.name.startswith("."):
            (export / path.name).write_bytes(path.read_bytes())
    before = sorted(path.name for path in export.iterdir())
    export.chmod(0o500)
    path = str(export / "tokenizer.model")
    assert docstring_tokenizer(path).vocab_size == 300
    assert docstring_tokenizer(path, str(made / "docstrings.json"), 280).vocab_size == 300
    assert sorted(path.name for path in export.iterdir()) == before


@pytest.mark.parametrize("dying", [".tokenizer.model.made_from.json", "tokenizer.json"])
def test_a_kill_while_it_is_made_anew_leaves_nothing_that_is_taken_for_whole(dying, made):
    make_tokenizer(made)
    whole = contents(made / "fresh")
    process = fork_context.Process(target=make_and_die_at, args=(dying, made))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert make_tokenizer(made).vocab_size == 300
    again = contents(made / "fresh")
    assert {name: again[name] for name in whole} == whole


def make_and_die_at(name, folder):
    def die(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith(f"/{name}"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    make_tokenizer(folder, 280)


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
