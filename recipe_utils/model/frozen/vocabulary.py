"""Comparison of tokenizers; a student and its teacher must have the same tokens."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torchtune.models.qwen2._tokenizer import bytes_to_unicode
from torchtune.modules.transforms.tokenizers import (
    SentencePieceBaseTokenizer,
    TikTokenBaseTokenizer,
)

Vocabulary = dict[int, str]
"""Token by id, as in a ``tokenizer.json``."""

_INNER = ("tt_model", "_spm_model", "tokenizer_model", "tokenizer")
"""Attributes in which torchtune's tokenizers and image transforms keep the inner tokenizer."""


def vocabulary_of(tokenizer: Any) -> Vocabulary | None:
    """Returns all tokens of a tokenizer, special ones included; None for an unsupported tokenizer.

    Supports torchtune's, those of the tokenizers library and any with a ``get_vocab``. Byte-level
    BPE tokens are in the characters that represent bytes: a leading space is ``Ġ``.
    """
    vocabulary = _without_special_tokens(tokenizer)
    special_tokens = getattr(tokenizer, "special_tokens", None)
    if vocabulary is not None and isinstance(special_tokens, dict):
        vocabulary |= {index: token for token, index in special_tokens.items()}
    return vocabulary


def _without_special_tokens(tokenizer: Any) -> Vocabulary | None:
    """Returns all tokens but special ones that a wrapper adds to its inner tokenizer."""
    if callable(getattr(tokenizer, "get_vocab", None)):
        return {index: token for token, index in tokenizer.get_vocab().items()}
    if isinstance(tokenizer, TikTokenBaseTokenizer):
        return _of_tiktoken(tokenizer.tt_model)
    if isinstance(tokenizer, SentencePieceBaseTokenizer):
        model = tokenizer.spm_model
        return {index: model.id_to_piece(index) for index in range(model.vocab_size())}
    encoder = getattr(tokenizer, "encoder", None)
    if isinstance(encoder, dict):
        return {index: token for token, index in encoder.items()}
    for name in _INNER:
        inner = getattr(tokenizer, name, None)
        if inner is not None:
            return vocabulary_of(inner)
    return None


def _of_tiktoken(encoding: Any) -> Vocabulary:
    printable = bytes_to_unicode()
    vocabulary = {}
    for index in range(encoding.n_vocab):
        try:
            token = encoding.decode_single_token_bytes(index)
        except KeyError:  # ids between special tokens may be unused
            continue
        vocabulary[index] = "".join(printable[byte] for byte in token)
    # Special tokens are text, not bytes.
    return vocabulary | {
        encoding.encode_single_token(token): token for token in encoding.special_tokens_set
    }


def check_same_tokens(
    student: Any,
    teacher: Any | None,
    teacher_folder: str | None,
    names: tuple[str, str] = ("student", "teacher"),
) -> str | None:
    """Compares a student's tokenizer with its teacher's, id by id.

    Ids above the other side's last one, and tokens that one side only reserves, are ignored.
    Without a ``teacher`` tokenizer the ``tokenizer.json`` in ``teacher_folder`` is used. Raises
    ValueError with the first id that differs; ``names`` are those of the models in it. Returns a
    warning if they cannot be compared.
    """
    not_checked = "so it was not checked that student and teacher share one tokenizer"
    name = "teacher_tokenizer"
    if teacher is None:
        path = Path(teacher_folder or "", "tokenizer.json")
        if teacher_folder is None or not path.is_file():
            where = "" if teacher_folder is None else f" in {teacher_folder}"
            return (
                f"teacher_tokenizer=null: the teacher has no tokenizer.json{where} either, {not_checked}; set "
                "it to the teacher's tokenizer"
            )
        name = str(path)
        try:
            teacher = Tokenizer.from_file(name)
        except Exception as error:  # the library raises nothing narrower
            return (
                f"{path}: {error}, {not_checked}; set teacher_tokenizer to the teacher's tokenizer"
            )
    own, other = vocabulary_of(student), vocabulary_of(teacher)
    if not own or not other:
        key, unread = ("tokenizer", student) if not own else (name, teacher)
        return (
            f"{key}: tokens of {type(unread).__name__} cannot be read, {not_checked}; set it to one of "
            "torchtune's tokenizers"
        )
    for index in range(min(max(own), max(other)) + 1):
        pair = own.get(index), other.get(index)
        if pair[0] != pair[1] and not any(map(_is_reserved, pair)):
            of_student, of_teacher = ("missing" if each is None else repr(each) for each in pair)
            raise ValueError(
                f"{name}: token {index} is {of_student} in the {names[0]}'s and {of_teacher} in the "
                f"{names[1]}'s; both must share one tokenizer, since their distributions are compared token by "
                "token"
            )
    return None


def _is_reserved(token: str | None) -> bool:
    """Returns True for a special token without a meaning yet, but not for the word "reserved" itself."""
    return token is not None and token[:1] in ("<", "[") and "reserved" in token.lower()
