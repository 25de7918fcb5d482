"""Tokenizer of a transformers folder, whose chat template determines the targets by rendering."""

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date as calendar_date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torchtune.utils import get_logger, log_rank_zero
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipe_utils.text.conversations.messages import Chat, Conversation, Tools, read_tools, read_turns
from recipe_utils.text.conversations.template import Alike, ChatTemplate, Encoded, any_of, num_common
from recipe_utils.update_steps.samples import SampleError

_SEEDS = (
    "It is 2024-01-31, 12:05; 1234567 + 89 = 1234656.", "a  b   c\td\n\n\ne \r\n f", "l'été, naïve, Straße, ÅÄÖ, e\u0301",
    "こんにちは、世界。 你好\uff0c世界\uff01 안녕하세요", "Привет, мир; שלום; مرحبا; नमस्ते; ไทย", "def f(x_1, *args):\n    return {'a': x_1[0]}",
    "I'm, you'll, WE'RE, don't", "https://a.b/c?d=e&f=%20#g", "😀👩‍👩‍👧 ≠ ½ ﬁ \uff46\uff55\uff4c\uff4c", "HelloWorld camelCase snake_case ABCdef",
)  # fmt: skip
_PROBES = [
    text[start:end].join(ends)
    for text in _SEEDS
    for ends in (("", ""), (" ", " "), ("\n", "1"))
    for start, end in ((0, None), (1, None), (3, -2), (5, None), (7, 20), (0, 9), (2, 4), (0, 1))
]
"""Texts on which tokenizers differ that split digits, spaces, accents or scripts otherwise."""


class FolderTokenizer:
    """Tokenizer of a local transformers folder, for recipes and datasets of torchtune.

    Args:
        path: folder with ``tokenizer.json``, and with a chat template if samples are messages.
        max_seq_len: number of tokens that samples are truncated to, on the right; null for no limit.
        train_on_last: train only the last assistant message of a sample.
        date: date that the chat template prints as today's, ``YYYY-MM-DD``.
        template_variables: further variables of the chat template, such as ``enable_thinking``.
        from_pretrained: arguments of ``AutoTokenizer.from_pretrained``, such as ``fix_mistral_regex: True``.
            Ids are then those of the class that it chooses, otherwise those of ``tokenizer.json``.

    Raises:
        ValueError: the folder has no fast tokenizer, or its chat template needs a date or does not use a variable.
    """

    def __init__(
        self,
        path: str,
        max_seq_len: int | None = None,
        train_on_last: bool = False,
        date: str | None = None,
        template_variables: dict[str, Any] | None = None,
        from_pretrained: dict[str, Any] | None = None,
    ) -> None:
        if not Path(path, "tokenizer.json").is_file():
            text = "no tokenizer.json; set it to a folder of transformers with a fast tokenizer"
            raise ValueError(f"tokenizer.path={path}: {text}")
        if max_seq_len is not None and max_seq_len < 1:
            raise ValueError(f"tokenizer.max_seq_len={max_seq_len}: set it to at least 1")
        self.max_seq_len, self._path, self._train_on_last = max_seq_len, Path(path), train_on_last
        self._variables = template_variables or {}
        self._warned: set[str] = set()
        self.tokenizer = inner = self._load(from_pretrained)
        self.vocab_size = len(inner)
        # A template that prints today's date would change the tokens of a run that resumes tomorrow.
        if "strftime_now(" in str(inner.chat_template):
            if date is None:
                raise ValueError(
                    "tokenizer.date=None: the chat template prints today's date, which would change the "
                    f"tokens of a run that resumes; set it, such as to '{calendar_date.today()}'"
                )
            day = calendar_date.fromisoformat(date)
            call = r"strftime_now\(\s*(['\"])(.*?)\1\s*\)"  # a template takes no functions as variables
            dated = partial(re.sub, call, lambda match: repr(day.strftime(match[2])))
            source = inner.chat_template  # one, or several by name
            by_name = isinstance(source, dict)
            inner.chat_template = {n: dated(s) for n, s in source.items()} if by_name else dated(source)
        # A misspelt variable would be ignored in silence.
        reserved = {"messages", *inspect.signature(inner.apply_chat_template).parameters}
        for name in self._variables:
            if name in reserved:
                text = "it is no variable of the chat template, but what the tokenizer passes"
                raise ValueError(f"tokenizer.template_variables.{name}: {text}; take it out")
            if not re.search(rf"\b{re.escape(name)}\b", str(inner.chat_template)):
                raise ValueError(
                    f"tokenizer.template_variables.{name}: the chat template of {path} does not use it; correct "
                    "its name, or take it out"
                )
        # Ends of a generation, and whether texts begin with a BOS, are spread over four files of the folder.
        source = str(inner.chat_template)
        self.bos_id, self.eos_id = inner.bos_token_id, inner.eos_token_id
        stops = {*_stops_of_generation(self._path), self.eos_id}
        self.stop_tokens: list[int] = sorted(stops & {*inner.get_vocab().values()})
        """Tokens that end a generation, those of ``generation_config.json`` included."""
        self.pad_id = next(i for i in (inner.pad_token_id, self.eos_id, 0) if i is not None)
        self._backend = inner.backend_tokenizer  # starts no threads, with which workers cannot fork
        self._backend.no_truncation()
        self._backend.no_padding()
        self._begin = [i for i in self._backend.encode("").ids if i == self.bos_id]
        prints_bos = re.search(rf"bos_token|{re.escape(inner.bos_token or 'bos_token')}", source)
        adds_bos = _json_of(self._path / "tokenizer_config.json").get("add_bos_token", bool(prints_bos))
        self._is_without_bos = bool(not self._begin and self.bos_id is not None and adds_bos)
        added = inner.added_tokens_decoder.values()
        self._added = re.compile(f"({any_of([token.content for token in added]).pattern})")
        self._special = any_of([token.content for token in added if token.special])
        names = inner.convert_ids_to_tokens(self.stop_tokens)
        used = [name for name in inner.get_added_vocab() if name in source]
        self._template = ChatTemplate(
            self._render, source, dict(zip(self.stop_tokens, names, strict=True)), used, self._path, self._warn
        )
        self.template_variables: frozenset[str] = frozenset()
        self.decode = partial(inner.decode, skip_special_tokens=True)

    def _load(self, options: dict[str, Any] | None) -> Any:
        """Returns the tokenizer; without ``options``, one whose ids are those of ``tokenizer.json``."""
        loaded = AutoTokenizer.from_pretrained(
            self._path, **{"local_files_only": True, "trust_remote_code": False, **(options or {})}
        )
        if options is not None:
            return loaded
        file = Tokenizer.from_file(str(self._path / "tokenizer.json"))
        for tokenizer in (file, loaded.backend_tokenizer):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        for text in _PROBES:
            by_class, by_file = (t.encode(text, add_special_tokens=False).ids for t in (loaded.backend_tokenizer, file))
            if by_class != by_file:
                self._warn(
                    f"{type(loaded).__name__}, the class of its tokenizer_config.json, encodes {text!r} otherwise "
                    "than tokenizer.json, which is taken (set tokenizer.from_pretrained={} to take the class)"
                )
                return PreTrainedTokenizerFast.from_pretrained(self._path, local_files_only=True)
        return loaded

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log_rank_zero(get_logger("INFO"), f"tokenizer.path={self._path}: {text}", logging.WARNING)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Returns the tokens of a text, with a BOS only if the folder's tokenizer adds one."""
        if add_bos and self._is_without_bos:
            self._warn(f"texts start without {self.tokenizer.bos_token}, with which this model's texts start")
        tokens = self._backend.encode(text, add_special_tokens=False).ids
        end = [self.eos_id] if add_eos and self.eos_id is not None else []
        return [*(self._begin if add_bos else []), *tokens, *end]

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Returns a sample with ``tokens`` and ``mask`` for its ``messages`` and ``tools``."""
        rest = dict(sample)
        messages, tools = rest.pop("messages"), rest.pop("tools", None)
        tokens, mask = self.tokenize_messages(messages, not inference, tools)
        return {**rest, "tokens": tokens, "mask": mask}

    def tokenize_messages(
        self, messages: Sequence[Any], add_eos: bool = True, tools: Any = None
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a conversation, and for each whether it is masked (no target).

        Messages are torchtune's, or mappings in OpenAI's format, where assistants train unless their ``weight`` is 0;
        ``tools`` are in that format, or their JSON text. ``add_eos=False`` returns the prompt of a generation, without
        an empty last message. Raises SampleError, with the turn, if the template does not determine the targets.
        """
        chat, weights = read_turns(messages)
        for index, weight in enumerate(weights):
            if weight not in (0, 1):
                text = "set it to 0 or 1, or dataset to a conversation_dataset"
                raise SampleError(f"turn {index} ({chat[index]['role']}): weight={weight:g}: {text}")
        conversation = Conversation(chat, weights, read_tools(tools))
        if add_eos:
            tokens, owners = self.tokenize(conversation)
            return tokens.tolist(), (owners < 0).tolist()
        self._check(conversation)
        is_open = chat[-1]["role"] == "assistant" and not chat[-1].get("content")
        chat = self._template.fitted(chat[:-1] if is_open else chat, conversation.tools)
        text = self._render(chat, conversation.tools, prompt=True)
        prompt = self.encode(text, add_bos=False, add_eos=False)[: self.max_seq_len]
        return prompt, [True] * len(prompt)

    def tokenize(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a conversation, and the index of the message whose targets they are, or -1; int64 [n] each.

        Raises SampleError, with the turn, if the template does not determine the targets.
        """
        self._check(conversation)
        trains = [weight > 0 for weight in conversation.weights]
        if self._train_on_last:
            answers = [i for i, message in enumerate(conversation.chat) if message["role"] == "assistant"]
            trains = [i in answers[-1:] for i in range(len(trains))]
        chat = self._template.fitted(conversation.chat, conversation.tools)
        tokens, owners = self._template.targets(chat, trains, conversation.tools, self._encoded, {})
        return tokens[: self.max_seq_len], owners[: self.max_seq_len]

    def tokenize_turns(
        self, conversation: Conversation, ends: Sequence[int]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the same as :meth:`tokenize` for the first ``end`` messages, of which only the last trains.

        Encodes what is between added tokens once. The longest text is also encoded as a whole; if that
        differs, so are all.
        """
        self._check(conversation)
        chat, tools = self._template.fitted(conversation.chat, conversation.tools), conversation.tools
        encode = _by_pieces(self._added, self._encoded)
        text = self._render(chat[: ends[-1]], tools)
        if not all(map(np.array_equal, encode(text), self._encoded(text))):
            encode = self._encoded
        alike: Alike = {}
        for end in ends:
            last = [i == end - 1 and conversation.weights[i] > 0 for i in range(end)]
            tokens, owners = self._template.targets(chat[:end], last, tools, encode, alike)
            yield tokens[: self.max_seq_len], owners[: self.max_seq_len]

    def _check(self, conversation: Conversation) -> None:
        """Raises SampleError for a special token in a text."""
        for index, message in enumerate(conversation.chat):
            if special := self._special.search(json.dumps(message, ensure_ascii=False, default=str)):
                text = f"its text contains the special token {special[0]}; remove it"
                raise SampleError(f"turn {index} ({message['role']}): {text}")

    def _encoded(self, text: str) -> Encoded:
        encoded = self._backend.encode(text, add_special_tokens=False)
        tokens = np.array(encoded.ids, dtype=np.int64)
        return tokens, np.fromiter((end for _, end in encoded.offsets), np.int64, len(tokens))

    def _render(self, chat: Chat, tools: Tools, prompt: bool = False, variables: Mapping[str, Any] = {}) -> str:
        if self.tokenizer.chat_template is None:
            problem = "it has no chat template for messages; add a chat_template.jinja, or set dataset to a"
            raise SampleError(f"tokenizer.path={self._path}: {problem} text_completion_dataset")
        try:
            text: str = self.tokenizer.apply_chat_template(
                chat, tools, tokenize=False, add_generation_prompt=prompt, **{**self._variables, **variables}
            )
        except Exception as error:  # any: a template is a program
            raise SampleError(f"the chat template fails: {error}") from error
        if self._begin and not text.startswith(bos := self.tokenizer.bos_token):
            self._warn(f"the chat template does not print {bos}, which the tokenizer adds to other texts")
        return text


def _by_pieces(added: re.Pattern[str], encode: Callable[[str], Encoded]) -> Callable[[str], Encoded]:
    """Returns a function that encodes the pieces of a text between added tokens, each once over all calls.

    Consecutive texts of a conversation begin alike, so the tokens of their common first pieces are kept, too.
    """
    known: dict[str, Encoded] = {}
    pieces: list[str] = []
    starts: list[tuple[int, int]] = [(0, 0)]  # of each piece: tokens and characters before it
    tokens = ends = np.empty(0, dtype=np.int64)

    def encode_pieces(text: str) -> Encoded:
        nonlocal pieces, tokens, ends
        before, pieces = pieces, added.split(text)
        num_same = num_common(before, pieces)
        del starts[num_same + 1 :]
        num_tokens, num_characters = starts[-1]
        parts = [(tokens[:num_tokens], ends[:num_tokens])]
        for piece in pieces[num_same:]:
            if piece not in known:
                known[piece] = encode(piece)
            ids, ends_in_piece = known[piece]
            parts.append((ids, ends_in_piece + num_characters))
            num_tokens, num_characters = num_tokens + len(ids), num_characters + len(piece)
            starts.append((num_tokens, num_characters))
        tokens, ends = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return tokens, ends

    return encode_pieces


def _stops_of_generation(path: Path) -> list[int]:
    """Returns ``eos_token_id`` of ``generation_config.json``; without one, of ``config.json``."""
    for file in (path / "generation_config.json", path / "config.json"):
        ids = _json_of(file).get("eos_token_id")
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return []


def _json_of(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}
