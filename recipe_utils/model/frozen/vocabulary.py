"""Whether two tokenizers have the same tokens, which a student and the teacher that it learns from must."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torchtune.modules.transforms.tokenizers import (
    SentencePieceBaseTokenizer,
    TikTokenBaseTokenizer,
)

Vocabulary = dict[int, str]
"""Id -> token, as a ``tokenizer.json`` writes it."""

_INNER = ("tt_model", "_spm_model", "tokenizer_model", "tokenizer")
"""Where torchtune's tokenizers, and its transforms of images, keep what has the tokens."""


def vocabulary_of(tokenizer: Any) -> Vocabulary | None:
    """All tokens of a tokenizer, special ones included; None for kinds that it cannot read.

    Those of byte-level BPE are in the characters that stand for bytes, a space in front as ``Ġ``.

    Args:
        tokenizer: one of torchtune's, or of the tokenizers library, or something with a ``get_vocab``.
    """
    vocabulary = _without_special_tokens(tokenizer)
    if vocabulary is not None:
        special_tokens = getattr(tokenizer, "special_tokens", None)
        if isinstance(special_tokens, dict):
            vocabulary |= {index: token for token, index in special_tokens.items()}
    return vocabulary


def _without_special_tokens(tokenizer: Any) -> Vocabulary | None:
    """The same, but for special tokens that the tokenizer itself adds to what it is made of."""
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
        except KeyError:  # between special tokens there are ids of none
            continue
        vocabulary[index] = "".join(printable[byte] for byte in token)
    # They are written as they are, whatever their bytes.
    return vocabulary | {
        encoding.encode_single_token(token): token for token in encoding.special_tokens_set
    }


def _printable_of_byte() -> list[str]:
    """The characters that byte-level BPE writes the 256 bytes as.

    Those of Latin-1 that can be seen stand for themselves, the others in turn for what follows Latin-1.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), 256)]
    seen.remove(0xAD)  # the soft hyphen
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


def check_same_tokens(student: Any, teacher: Any | None, teacher_folder: str | None) -> str | None:
    """Compares a student's tokenizer with its teacher's, id by id.

    No difference are ids above all of the other side's, and those that one side only reserves.

    Args:
        student: tokenizer of the student.
        teacher: that of the teacher; None to compare with the ``tokenizer.json`` in its folder.
        teacher_folder: of the teacher's checkpoint; None if it has none.

    Returns:
        A warning if they cannot be compared, which says why not; None if they are the same.

    Raises:
        ValueError: they differ; names the first id that does.
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
    """Whether it is a special token that stands for nothing yet: the word itself is a token, too."""
    return token is not None and token[:1] in ("<", "[") and "reserved" in token.lower()


def _named(vocabulary: Vocabulary, index: int) -> str:
    return repr(vocabulary[index]) if index in vocabulary else "missing"
