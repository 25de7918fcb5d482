"""Conversations with thinking about Python's standard library, and a tokenizer whose chat template drops it."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from recipe_utils.examples.build_once import build_once
from recipe_utils.examples.byte_pairs import END
from recipe_utils.examples.question_answers import check_split, split_of
from recipe_utils.examples.stdlib_code import code_pairs
from recipe_utils.examples.stdlib_docs import docstring_pairs, docstring_tokenizer
from recipe_utils.files import write_atomically
from recipe_utils.text.conversations.file_datasets import ConversationDataset
from recipe_utils.text.conversations.tokenizer import FolderTokenizer

# As Qwen3's: the thinking before the last user's message is not rendered.
CHAT_TEMPLATE = """{{- bos_token }}
{%- set last = namespace(user=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if message.reasoning_content and loop.index0 > last.user %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
_MAX_CHARACTERS = 600  # of an answer
_MAX_TURNS = 10


def conversation_tokenizer(
    path: str, docstrings_path: str, vocab_size: int = 4096, max_seq_len: int | None = None
) -> FolderTokenizer:
    """Returns the tokenizer of :func:`.docstring_tokenizer` with a chat template that drops thinking.

    Arguments are those of :func:`.docstring_tokenizer`; the folder of ``path`` gets the files of transformers.
    """
    special_tokens = docstring_tokenizer(path, docstrings_path, vocab_size).special_tokens
    folder = Path(path).parent
    stops = {"eos_token_id": [special_tokens[END], special_tokens["<|eot_id|>"]]}
    files = {"generation_config.json": json.dumps(stops), "chat_template.jinja": CHAT_TEMPLATE}
    for name, content in files.items():
        if not (folder / name).exists() or (folder / name).read_text() != content:
            write_atomically(folder / name, content)
    return FolderTokenizer(str(folder), max_seq_len)


def conversation_dataset(
    tokenizer: FolderTokenizer,
    path: str,
    docstrings_path: str,
    split: str = "train",
    num_validation_samples: int = 32,
    split_turns: Any = False,
) -> ConversationDataset:
    """Returns a split of the conversations, in a file that the first call writes.

    A conversation asks about the functions of a module or class: the thinking is a function's code, the answer its
    docstring. For ``split_turns`` see :class:`.ConversationDataset`, for other arguments :func:`.docstring_dataset`.
    """
    check_split(split)

    def write() -> None:
        conversations = split_of(_collect(docstrings_path), split, num_validation_samples)
        lines = (json.dumps({"messages": messages}) + "\n" for messages in conversations)
        write_atomically(Path(path), "".join(lines))

    build_once(Path(path), write)
    return ConversationDataset(tokenizer, path, split_turns)


def _collect(docstrings_path: str) -> list[list[dict[str, str]]]:
    """Returns the messages of conversations of 2 to 10 turns."""
    code_of = {question[7:-2]: code for question, code in code_pairs()}  # "Write `name`."
    turns = defaultdict(list)
    for question, answer in docstring_pairs(docstrings_path):
        name = question.split("`")[1]
        if name in code_of and len(answer) <= _MAX_CHARACTERS:
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "reasoning_content": code_of[name].strip(), "content": answer.strip()},
            ]
            turns[name.rpartition(".")[0]].append(messages)
    parts = (of_class[i : i + _MAX_TURNS] for of_class in turns.values() for i in range(0, len(of_class), _MAX_TURNS))
    return [[message for turn in part for message in turn] for part in parts if len(part) > 1]
