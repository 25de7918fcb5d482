"""Comparison of the tokenizers of two models, which must have the same tokens."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


def check_same_tokens(checkpointer: Any, other: Any, names: tuple[str, str]) -> bool:
    """Compares the ``tokenizer.json`` beside the weights of two checkpointers, id by id.

    Ids of one side alone, and tokens that one side only reserves, are ignored. Raises ValueError with the first id that
    differs; ``names`` are those of the models. Returns False if either has no such file.
    """
    folders = [getattr(each, "_checkpoint_dir", None) for each in (checkpointer, other)]
    paths = [Path(folder, "tokenizer.json") for folder in folders if folder is not None]
    if len(paths) < 2 or not all(path.is_file() for path in paths):
        return False
    tokens, others = (
        {index: token for token, index in Tokenizer.from_file(str(path)).get_vocab().items()} for path in paths
    )
    for index in sorted(tokens.keys() & others.keys()):
        pair = tokens[index], others[index]
        # A special token without a meaning yet, but not the word "reserved" itself
        if pair[0] != pair[1] and not any(t[:1] in ("<", "[") and "reserved" in t.lower() for t in pair):
            raise ValueError(
                f"{paths[1]}: token {index} is {pair[0]!r} in the {names[0]}'s and {pair[1]!r} in the "
                f"{names[1]}'s; both must share one tokenizer, since they are compared token by token"
            )
    return True
