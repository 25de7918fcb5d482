"""Comparison of tokenizers; a student and its teacher must have the same tokens."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
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
    if vocabulary is not None:
        special_tokens = getattr(tokenizer, "special_tokens", None)
        if isinstance(special_tokens, dict):
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
    printable = _printable_of_byte()
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


def _printable_of_byte() -> list[str]:
    """Returns the characters that represent the 256 bytes in byte-level BPE.

    Visible Latin-1 characters represent themselves, other bytes the characters after Latin-1 in
    order.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), 256)]
    seen.remove(0xAD)  # the soft hyphen
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


def check_same_tokens(student: Any, teacher: Any | None, teacher_folder: str | None) -> str | None:
    """Compares a student's tokenizer with its teacher's, id by id.

    Ids above the other side's last one, and tokens that one side only reserves, are ignored.
    Without a ``teacher`` tokenizer the ``tokenizer.json`` in ``teacher_folder`` is used.

    Returns:
        A warning with the reason if they cannot be compared; None if they are the same.

    Raises:
        ValueError: they differ; names the first such id.
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
        if _differ(own.get(index), other.get(index)):
            raise ValueError(
                f"{name}: token {index} is {_named(own, index)} in the student's and "
                f"{_named(other, index)} in the teacher's; both must share one tokenizer, since their "
                "distributions are compared token by token"
            )
    return None


def _differ(own: str | None, other: str | None) -> bool:
    return own != other and not _is_reserved(own) and not _is_reserved(other)


def _is_reserved(token: str | None) -> bool:
    """Returns True for a special token without a meaning yet, but not for the word "reserved" itself."""
    return token is not None and token[:1] in ("<", "[") and "reserved" in token.lower()


def _named(vocabulary: Vocabulary, index: int) -> str:
    return repr(vocabulary[index]) if index in vocabulary else "missing"
