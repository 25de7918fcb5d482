"""Tokenizers of all files and libraries are compared, and the first token that differs is named."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torchtune.models.gemma import GemmaTokenizer
from torchtune.models.llama2 import Llama2Tokenizer
from torchtune.models.llama3._tokenizer import CL100K_PATTERN, LLAMA3_SPECIAL_TOKENS
from torchtune.models.phi4._tokenizer import Phi4Tokenizer
from torchtune.models.qwen2 import Qwen2Tokenizer
from torchtune.models.qwen2_5._tokenizer import Qwen2_5Tokenizer
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

from recipe_utils.embedded.stdlib_docs import SPECIAL_TOKENS, docstring_tokenizer
from recipe_utils.model.frozen.vocabulary import check_same_tokens, vocabulary_of

QUESTIONS = [
    (f"What does the method {word} do?", f"Café: {word} — the other one, naïve 你好 🐍.\n\n\t" * 3)
    for word in ["collections", "contextlib", "dataclasses", "functools", "itertools", "operator"]
]
NUM_MERGED = 340
CHAT_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<tool_call>", "</tool_call>",
    "<|dummy_85|>",
)  # fmt: skip


def byte_pair_tokenizer(*special_tokens):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CL100K_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_MERGED,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{q}\n\n{a}" for q, a in QUESTIONS), trainer)
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


class Files:
    """The same merges as tiktoken's file, as ``tokenizer.json``, and as ``vocab.json`` and ``merges.txt``."""

    def __init__(self, folder):
        self.folder = folder
        questions = folder / "questions.json"
        questions.write_text(json.dumps(QUESTIONS))
        self.tiktoken_path = str(folder / "tokenizer.model")
        self.tiktoken = docstring_tokenizer(
            self.tiktoken_path, str(questions), NUM_MERGED + len(SPECIAL_TOKENS)
        )
        self.library = byte_pair_tokenizer(*SPECIAL_TOKENS)
        (folder / "hf").mkdir()
        self.library.save(str(folder / "hf/tokenizer.json"))
        byte_pair_tokenizer().model.save(str(folder / "hf"))
        self.vocab_and_merges = str(folder / "hf/vocab.json"), str(folder / "hf/merges.txt")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("tokenizers"))


class Named:
    """A tokenizer that has only a vocabulary."""

    def __init__(self, ids):
        self.get_vocab = lambda: ids


def with_token(tokenizer, index, token):
    """Returns the same vocabulary with another token of an id; None makes a hole."""
    ids = {other: i for other, i in tokenizer.get_vocab().items() if i != index}
    return Named(ids if token is None else {**ids, token: index})


# ---- Kinds -------------------------------------------------------------------------------------------


def test_a_tiktoken_file_has_the_tokens_of_a_tokenizer_json(files):
    vocabulary = vocabulary_of(files.tiktoken)
    assert vocabulary == vocabulary_of(files.library)
    assert vocabulary == vocabulary_of(
        SimpleNamespace(tokenizer=files.tiktoken)
    )  # of an image transform
    assert sorted(vocabulary) == list(range(NUM_MERGED + len(SPECIAL_TOKENS)))
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary.values())
    assert "Ġthe" in vocabulary.values()
    assert check_same_tokens(files.tiktoken, None, str(files.folder / "hf")) is None
    assert check_same_tokens(files.tiktoken, files.library, None) is None


@pytest.mark.parametrize("kind", [Qwen2Tokenizer, Qwen2_5Tokenizer, Phi4Tokenizer])
def test_a_vocab_json_has_the_tokens_of_a_tokenizer_json(kind, files):
    special_tokens = {token: NUM_MERGED + i for i, token in enumerate(CHAT_TOKENS)}
    vocab, merges = files.vocab_and_merges
    paths = (merges, vocab) if kind is Phi4Tokenizer else (vocab, merges)
    tokenizer = kind(*paths, special_tokens=special_tokens)
    library = byte_pair_tokenizer(*CHAT_TOKENS)
    assert vocabulary_of(tokenizer) == vocabulary_of(library)
    assert check_same_tokens(tokenizer, library, None) is None


def test_torchtune_s_wrapper_of_a_tokenizer_json_has_its_tokens(files):
    config = files.folder / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1]}))
    wrapper = HuggingFaceBaseTokenizer(
        str(files.folder / "hf/tokenizer.json"), tokenizer_config_json_path=str(config)
    )
    assert check_same_tokens(wrapper, files.tiktoken, None) is None


@pytest.fixture(scope="module")
def sentencepiece_path(tmp_path_factory):
    import sentencepiece

    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(sentence for pair in QUESTIONS for sentence in pair),
            model_writer=file, vocab_size=350, model_type="bpe", byte_fallback=True,
            minloglevel=2,
        )  # fmt: skip
    return str(path)


@pytest.mark.parametrize("kind", [Llama2Tokenizer, GemmaTokenizer])
def test_a_sentencepiece_file_has_the_tokens_of_a_tokenizer_json(kind, sentencepiece_path):
    vocabulary = vocabulary_of(kind(sentencepiece_path))
    assert len(vocabulary) == 350
    assert [vocabulary[i] for i in range(5)] == ["<unk>", "<s>", "</s>", "<0x00>", "<0x01>"]
    assert "▁the" in vocabulary.values()
    of_json = Tokenizer(models.BPE({token: i for i, token in vocabulary.items()}, []))
    assert check_same_tokens(kind(sentencepiece_path), of_json, None) is None


# ---- Differences -------------------------------------------------------------------------------------


def test_the_first_token_that_differs_is_named(files):
    ids, tokens = files.library.get_vocab(), vocabulary_of(files.library)
    first, last = ids["Ġthe"], NUM_MERGED - 1
    swapped = Named({**ids, "Ġthe": last, tokens[last]: first})
    with pytest.raises(ValueError, match="teacher's") as error:
        check_same_tokens(files.tiktoken, swapped, None)
    assert str(error.value) == (
        f"teacher_tokenizer: token {first} is 'Ġthe' in the student's and {tokens[last]!r} in the teacher's; "
        "both must share one tokenizer, since their distributions are compared token by token"
    )


def test_the_teacher_s_tokenizer_goes_before_the_file_in_its_folder(files, tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_pair_tokenizer(*CHAT_TOKENS).save(str(path))
    assert check_same_tokens(files.tiktoken, files.library, str(tmp_path)) is None
    text = rf"{path}: token {NUM_MERGED} is '<\|begin_of_text\|>' in the"
    with pytest.raises(ValueError, match=text):
        check_same_tokens(files.tiktoken, None, str(tmp_path))


PLACE = NUM_MERGED + 3


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda _: byte_pair_tokenizer(*SPECIAL_TOKENS, "<|one|>", "<|two|>"), None),
        (lambda library: with_token(library, PLACE, None), "missing"),
        (lambda library: with_token(library, PLACE, "<|reserved_special_token_2|>"), None),
        (lambda library: with_token(library, PLACE, "Ġreserved"), "'Ġreserved'"),
    ],
    ids=["longer", "hole", "reserved token", "the word reserved"],
)
def test_only_other_tokens_are_differences_on_either_side(change, difference, files):
    other = change(files.library)
    for index, pair in enumerate(((files.tiktoken, other), (other, files.tiktoken))):
        if difference is None:
            assert check_same_tokens(*pair, None) is None
            continue
        names = [r"'<\|step_id\|>'", difference][:: -1 if index else 1]
        text = f"{PLACE} is {names[0]} in the student's and {names[1]} in the teacher's"
        with pytest.raises(ValueError, match=text):
            check_same_tokens(*pair, None)


def test_llama_3_s_special_tokens_are_those_of_meta_s_tokenizer_json():
    of_meta = {
        128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128004: "<|finetune_right_pad_id|>",
        128006: "<|start_header_id|>", 128007: "<|end_header_id|>", 128008: "<|eom_id|>",
        128009: "<|eot_id|>", 128010: "<|python_tag|>",
    }  # fmt: skip
    others = [index for index in range(128000, 128256) if index not in of_meta]
    of_meta |= {index: f"<|reserved_special_token_{i}|>" for i, index in enumerate(others)}
    assert of_meta[128005] == "<|reserved_special_token_2|>"
    assert of_meta[128255] == "<|reserved_special_token_247|>"
    by_token = {token: index for index, token in of_meta.items()}
    assert check_same_tokens(Named(LLAMA3_SPECIAL_TOKENS), Named(by_token), None) is None


# ---- What cannot be compared -------------------------------------------------------------------------


@pytest.mark.parametrize("in_folder", [False, True])
def test_without_a_tokenizer_of_the_teacher_s_a_warning_names_the_key(in_folder, files, tmp_path):
    warning = check_same_tokens(files.tiktoken, None, str(tmp_path) if in_folder else None)
    assert warning.startswith("teacher_tokenizer=null: the teacher has no tokenizer.json")
    assert (str(tmp_path) in warning) == in_folder
    assert warning.endswith("set it to the teacher's tokenizer")


def test_a_corrupt_tokenizer_json_is_named_in_a_warning(files, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    warning = check_same_tokens(files.tiktoken, None, str(tmp_path))
    assert warning.startswith(f"{tmp_path}/tokenizer.json: ")
    assert warning.endswith("set teacher_tokenizer to the teacher's tokenizer")


def test_an_unsupported_tokenizer_is_named_in_a_warning(files):
    unsupported = SimpleNamespace(pad_id=0)
    assert vocabulary_of(unsupported) is None
    text = "tokens of SimpleNamespace cannot be read"
    warning = check_same_tokens(unsupported, files.tiktoken, None)
    assert warning.startswith(f"tokenizer: {text}")
    warning = check_same_tokens(files.tiktoken, unsupported, None)
    assert warning.startswith(f"teacher_tokenizer: {text}")
