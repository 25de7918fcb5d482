"""The embedded data: thousands of real texts, a tokenizer without loss, two disjoint splits."""

import errno
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import tiny
import transformers
from recipe_runs import keep_messages
from torchtune.data import Message

from recipe_utils.examples.build_once import build_once
from recipe_utils.examples.stdlib_docs import docstring_dataset, docstring_pairs, docstring_tokenizer


def test_there_are_thousands_of_different_pairs_of_very_different_length(built):
    assert len(set(built.pairs)) == len(built.pairs) > 3000
    lengths = sorted(len(answer) for _, answer in built.pairs)
    assert lengths[0] > 0
    assert lengths[-1] > 20 * lengths[len(lengths) // 2]
    answers = dict(built.pairs)
    assert answers["What does `json.dumps` do?"].startswith(json.dumps.__doc__.strip()[:40])


@pytest.mark.parametrize(
    "text", ["", " ", "x = {'a': [1, 2]}\n\n\tdef f():  # ok", "naïve — 你好 🐍\r\n\0", "<|eot_id|>"]
)
def test_the_tokenizer_decodes_any_text_as_it_was(built, text):
    tokens = built.tokenizer.encode(text, add_bos=True, add_eos=True)
    assert built.text_of(tokens[1:-1]) == text


def test_the_tokenizer_encodes_answers_in_far_fewer_tokens_than_bytes(built):
    answers = [answer for _, answer in built.pairs[::40]]
    encoded = [built.tokenizer.encode(text, add_bos=False, add_eos=False) for text in answers]
    assert [built.text_of(tokens) for tokens in encoded] == answers
    assert sum(map(len, encoded)) < 0.5 * sum(len(answer.encode()) for answer in answers)


def test_pairs_and_tokenizer_are_built_once_and_read_again_equal(built):
    files = [*built.tokenizer_path.parent.glob("*token*"), built.tokenizer_path.parents[1]]
    written = [file.stat().st_mtime_ns for file in files]
    assert docstring_pairs(built.path) == built.pairs
    again = docstring_tokenizer(str(built.tokenizer_path), built.path, 1024, max_seq_len=7)
    assert [file.stat().st_mtime_ns for file in files] == written
    for _, answer in built.pairs[:20]:
        assert again.encode(answer) == built.tokenizer.encode(answer)
    assert again.special_tokens == built.tokenizer.special_tokens
    assert again.max_seq_len == 7


@pytest.mark.parametrize("argument", ["path", "copied_from"])
def test_a_missing_tokenizer_is_reported_with_the_command_that_makes_one(argument, built, tmp_path):
    """It is also reported if there is a copy of an earlier one."""
    missing, copy = tmp_path / "epoch_0/tokenizer.model", str(tmp_path / "fresh/tokenizer.model")
    docstring_tokenizer(copy, copied_from=str(built.tokenizer_path))
    arguments = {"path": copy, argument: str(missing)}
    with pytest.raises(ValueError, match=rf"^{argument}=.*no tokenizer.*5M_full_update_step"):
        docstring_tokenizer(**arguments)
    assert not missing.parent.exists()


@pytest.fixture(scope="module")
def hugging_face(built):
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
    assert len(hugging_face) == 1024
    assert hugging_face.get_added_vocab() == built.tokenizer.special_tokens
    for name in ("bos", "eos", "pad"):
        expected = getattr(built.tokenizer, f"{name}_id")
        assert getattr(hugging_face, f"{name}_token_id") == expected


def test_transformers_chat_template_gives_the_ids_of_training_and_generation(built, hugging_face):
    texts = [("user", " What does `os` do?\n"), ("assistant", "It  does\n\nmuch.")]
    messages = [Message(role=role, content=text) for role, text in texts]
    chat = [{"role": role, "content": text} for role, text in texts]
    whole = hugging_face.apply_chat_template(chat, return_dict=False)
    assert whole == built.tokenizer.tokenize_messages(messages)[0]
    prompt = hugging_face.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
    question = [messages[0], Message(role="assistant", content="")]
    assert prompt == built.tokenizer.tokenize_messages(question, add_end_tokens=False)[0]


@pytest.fixture
def small(built, tmp_path):
    """Returns a folder with a few of the texts, whose tokenizer is trained quickly."""
    texts = [pair for pair in built.pairs if len(pair[1]) < 60]
    (tmp_path / "docstrings.json").write_text(json.dumps(texts[:50]))
    return tmp_path


def make_tokenizer(folder, vocab_size=300):
    return docstring_tokenizer(str(folder / "fresh/tokenizer.model"), str(folder / "docstrings.json"), vocab_size)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_tokenizer_follows_the_size_of_the_vocabulary_and_the_texts(small):
    make_tokenizer(small)
    with keep_messages() as messages:
        assert make_tokenizer(small, 280).vocab_size == 280
        before = contents(small / "fresh")
        (small / "docstrings.json").write_text(json.dumps([["zzqj" * 20, "zzqj " * 20]]))
        other = make_tokenizer(small, 280)
    assert len(other.encode("zzqjzzqj", add_bos=False, add_eos=False)) == 1
    now = contents(small / "fresh")
    for name in ("tokenizer.model", "tokenizer.json"):
        assert now[name] != before[name]
    assert messages[0].endswith("is rebuilt: vocab_size is 280 and was 300")
    assert re.search(r"is rebuilt: docstrings_path is \w+ and was \w+$", messages[1])
    assert len(messages) == 2


def test_a_copied_tokenizer_follows_the_one_that_it_is_copied_from(small):
    make_tokenizer(small)
    source, path = small / "fresh/tokenizer.model", small / "student/tokenizer.model"
    docstring_tokenizer(str(path), copied_from=str(source))
    changed = make_tokenizer(small, 290)
    copy = docstring_tokenizer(str(path), copied_from=str(source), max_seq_len=7)
    assert (copy.vocab_size, copy.max_seq_len) == (changed.vocab_size, 7)
    record = f".{path.name}.made_from.json"
    assert {**contents(path.parent), record: 0} == {**contents(source.parent), record: 0}


def test_files_of_an_export_are_read_without_a_change(small):
    """torchtune copies them without those that begin with a dot."""
    make_tokenizer(small)
    export = small / "epoch_0"
    export.mkdir()
    for name, content in contents(small / "fresh").items():
        if not name.startswith("."):
            (export / name).write_bytes(content)
    before = contents(export)
    export.chmod(0o500)
    path = str(export / "tokenizer.model")
    assert docstring_tokenizer(path).vocab_size == 300
    assert docstring_tokenizer(path, str(small / "docstrings.json"), 280).vocab_size == 300
    assert contents(export) == before


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "model-00001-of-00002.safetensors"])
def test_a_tokenizer_is_not_built_into_the_folder_of_another_model(name, small):
    (small / "fresh").mkdir()
    (small / "fresh" / name).write_text("another")
    with pytest.raises(ValueError, match=f"beside files of another model: {name}; set an empty folder"):
        make_tokenizer(small)
    assert contents(small / "fresh") == {name: b"another"}


def test_one_of_several_builds_where_files_cannot_be_locked(tmp_path, monkeypatch):
    def build():
        time.sleep(0.2)
        with (tmp_path / "file").open("a") as file:
            file.write("built")

    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks")))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: build_once(tmp_path / "file", build), range(3)))
    assert (tmp_path / "file").read_text() == "built"


@pytest.mark.parametrize("name", [".tokenizer.model.made_from.json", "tokenizer.json"])
def test_no_file_of_a_killed_build_is_taken_for_a_whole_one(name, small, interrupted_at):
    make_tokenizer(small)
    whole = contents(small / "fresh")
    interrupted_at(name, make_tokenizer, small, 280)
    assert make_tokenizer(small).vocab_size == 300
    again = contents(small / "fresh")
    assert {name: again[name] for name in whole} == whole


def splits(built, **options):
    return [docstring_dataset(built.tokenizer, built.path, split, **options) for split in ("train", "validation")]


def test_train_and_validation_share_no_sample_and_are_all_pairs(built):
    train, validation = splits(built, num_validation_samples=500)
    assert len(validation) == 500
    assert len(train) + len(validation) == len(built.pairs)
    with pytest.raises(ValueError, match="split=test: unknown"):
        docstring_dataset(built.tokenizer, built.path, "test")
    texts = [{built.text_of(sample["tokens"]) for sample in each} for each in (train, validation)]
    assert not texts[0] & texts[1]
    first, second = splits(built)[1], splits(built)[1]
    assert [sample["tokens"] for sample in first] == [sample["tokens"] for sample in second]


def test_only_the_answer_is_a_target_unless_train_on_input(built):
    answers = {answer.strip() for _, answer in built.pairs}
    _, validation = splits(built)
    _, with_input = splits(built, train_on_input=True)
    for masked, unmasked in zip(validation, with_input, strict=True):
        assert masked["tokens"] == unmasked["tokens"]
        targets = built.text_of(label for label in masked["labels"] if label != tiny.IGNORE)
        # The tokenizer puts a header and an end around each message.
        answer = re.fullmatch(r"<\|start.*assistant<\|end_header_id\|>(.*)<\|eot_id\|>", targets, re.S)
        assert answer[1].strip() in answers
        num_ignored = [list(s["labels"]).count(tiny.IGNORE) for s in (masked, unmasked)]
        assert num_ignored[1] < num_ignored[0] < len(masked["labels"])
