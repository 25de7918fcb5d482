"""Byte-pair encoding as Llama 3's: training, and files for transformers."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from torchtune.models.llama3._tokenizer import CL100K_PATTERN

TokenRanks = dict[bytes, int]
"""Token bytes -> id; of two pairs of neighbors the one with the lower id is merged first."""

BEGIN, END, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"

# Gives the tokens of ``Llama3Tokenizer.tokenize_messages``, BEGIN and END included.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{%- else %}"
    "{{- eos_token }}"
    "{%- endif %}"
)


def train_byte_pairs(texts: Iterable[str], num_tokens: int) -> TokenRanks:
    """Learns ``num_tokens`` tokens, including those of the 256 single bytes."""
    tokenizer = Tokenizer(models.BPE())
    # Must be that of the encoding, or learned tokens would not occur.
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = BpeTrainer(
        vocab_size=num_tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    byte_of = {char: byte for byte, char in enumerate(_printable_bytes())}
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {bytes(byte_of[char] for char in token): rank for token, rank in vocab}


def hugging_face_files(ranks: TokenRanks, special_tokens: Mapping[str, int]) -> dict[str, str]:
    """Returns the files of transformers' ``AutoTokenizer``, content by name.

    Its ids are BEGIN and those of torchtune, unless the text contains the name of a special token, which transformers
    converts to the token. Ids of ``special_tokens``, by name, follow those of ``ranks``.
    """
    printable = _printable_bytes()

    def written(token: bytes) -> str:
        return "".join(printable[byte] for byte in token)

    # The format lists merges; tiktoken's implies them by the ids.
    vocab = {written(token): rank for token, rank in ranks.items()}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        # All pairs of tokens that form it, since tiktoken ranks a merge by its result.
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(written(left), written(right)) for left, right in pairs]
    # As in tiktoken, a piece of text that is a token is not split.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    names = sorted(special_tokens, key=special_tokens.__getitem__)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1", special_tokens=[(BEGIN, special_tokens[BEGIN])]
    )
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {"tokenizer_config.json": json.dumps(settings, indent=2), "tokenizer.json": tokenizer.to_str(pretty=True)}


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Returns Llama 3's pre-tokenizer."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CL100K_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _printable_bytes() -> list[str]:
    """Returns the characters for the 256 bytes in byte-level BPE (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
