"""Tokenizer of a transformers folder, whose chat template determines the targets by rendering."""

import inspect
import json
import logging
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import date as calendar_date
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from torchtune.data import truncate
from torchtune.utils import get_logger, log_rank_zero
from transformers import AutoTokenizer

from recipe_utils.data.loader.samples import SampleError
from recipe_utils.data.text.messages import TEXT_KEYS, in_openai_format

Chat = list[dict[str, Any]]
Owned = list[tuple[int, int | None]]
"""Tokens, each with the index of the message whose target it is; None if masked."""
_NOTEXT_KEYS = ("name", "id", "type")


class FolderTokenizer:
    """Tokenizer of a local transformers folder, for recipes and datasets of torchtune.

    Args:
        path: folder with ``tokenizer.json``, and with a chat template if samples are messages.
        max_seq_len: number of tokens that samples are truncated to, on the right; null for no limit.
        train_on_last: train only the last assistant message of a sample.
        date: date that the chat template prints as today's, ``YYYY-MM-DD``.
        template_variables: further variables of the chat template, such as ``enable_thinking``.

    Raises:
        ValueError: the folder has no fast tokenizer, or its chat template needs a date or does not use
            a variable.
    """

    def __init__(
        self,
        path: str,
        max_seq_len: int | None = None,
        train_on_last: bool = False,
        date: str | None = None,
        template_variables: dict[str, Any] | None = None,
    ) -> None:
        if not Path(path, "tokenizer.json").is_file():
            text = "no tokenizer.json; set it to a folder of transformers with a fast tokenizer"
            raise ValueError(f"tokenizer.path={path}: {text}")
        if max_seq_len is not None and max_seq_len < 1:
            raise ValueError(f"tokenizer.max_seq_len={max_seq_len}: set it to at least 1")
        self.tokenizer = inner = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.max_seq_len, self.vocab_size = max_seq_len, len(inner)
        self._path, self._train_on_last = Path(path), train_on_last
        self._variables = template_variables or {}
        if "strftime_now(" in str(inner.chat_template):
            if date is None:
                raise ValueError(
                    "tokenizer.date=None: the chat template prints today's date, which would change the "
                    f"tokens of a run that resumes; set it, such as to '{calendar_date.today()}'"
                )
            day = calendar_date.fromisoformat(date)
            call = r"strftime_now\(\s*(['\"])(.*?)\1\s*\)"  # a template takes no functions as variables
            inner.chat_template = re.sub(
                call, lambda found: repr(day.strftime(found[2])), inner.chat_template
            )
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
        self.bos_id, self.eos_id = inner.bos_token_id, inner.eos_token_id
        stops = {*_stops_of_generation(self._path), self.eos_id}
        self.stop_tokens: list[int] = sorted(stops & {*inner.get_vocab().values()})
        """Tokens that end a generation, those of ``generation_config.json`` included."""
        self.pad_id = next(i for i in (inner.pad_token_id, self.eos_id, 0) if i is not None)
        self._backend = inner.backend_tokenizer  # starts no threads, with which workers cannot fork
        self._backend.no_truncation()
        self._backend.no_padding()
        self._begin = [i for i in self._backend.encode("").ids if i == self.bos_id]
        special = inner.added_tokens_decoder.values()
        self._special = [token.content for token in special if token.special]
        names = inner.convert_ids_to_tokens(self.stop_tokens)
        used = [name for name in inner.get_added_vocab() if name in str(inner.chat_template)]
        self._stop, self._control = map(_any_of, (names, [*names, *used]))
        self.decode = partial(inner.decode, skip_special_tokens=True)
        self._proved: set[Any] = set()
        self._warned: set[str] = set()

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log_rank_zero(
                get_logger("INFO"), f"tokenizer.path={self._path}: {text}", logging.WARNING
            )

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Returns the tokens of a text, with a BOS only if the folder's tokenizer adds one."""
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
        self, messages: Sequence[Any], add_eos: bool = True, tools: list[Any] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a conversation, and for each whether it is masked (no target).

        Args:
            messages: torchtune's messages, or mappings in OpenAI's format, where assistants train
                unless their ``weight`` is 0.
            add_eos: False returns the prompt of a generation, without an empty last message.
            tools: tools in OpenAI's format.

        Raises:
            SampleError: the template does not determine the targets; the error names the turn.
        """
        pairs = [in_openai_format(message) for message in messages]
        chat, trains = [message for message, _ in pairs], [is_trained for _, is_trained in pairs]
        for index, message in enumerate(chat):
            text = json.dumps(message, ensure_ascii=False, default=str)
            for token in self._special:
                if token in text:
                    _refuse(chat, index, f"its text contains the special token {token}; remove it")
        if self._train_on_last:
            answers = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
            trains = [i in answers[-1:] for i in range(len(chat))]
        if add_eos:
            owned = self._targets(chat, trains, tools)
            self._prove(chat, trains, tools, owned)
            tokens, mask = [token for token, _ in owned], [owner is None for _, owner in owned]
        else:
            is_open = chat[-1]["role"] == "assistant" and not chat[-1].get("content")
            text = self._render(chat[:-1] if is_open else chat, tools, prompt=True)
            tokens = self.encode(text, add_bos=False, add_eos=False)
            mask = [True] * len(tokens)
        end = len(tokens) if self.max_seq_len is None else self.max_seq_len
        return truncate(tokens, end), truncate(mask, end)

    def _render(self, chat: Chat, tools: list[Any] | None, prompt: bool = False) -> str:
        if self.tokenizer.chat_template is None:
            raise SampleError(
                f"tokenizer.path={self._path}: it has no chat template for messages; add a "
                "chat_template.jinja, or set dataset to a text_completion_dataset"
            )
        try:
            text: str = self.tokenizer.apply_chat_template(
                chat, tools, tokenize=False, add_generation_prompt=prompt, **self._variables
            )
        except Exception as error:  # any: a template is a program
            raise SampleError(f"the chat template fails: {error}") from error
        return text

    def _targets(self, chat: Chat, trains: Sequence[bool], tools: Any) -> Owned:
        """Returns the tokens of a conversation, each with the trained message that it belongs to.

        An assistant's turn starts where the generation prompt ends, and ends after its last stop
        token. Other messages train as a whole. A token belongs to the message of its last character.
        """
        render = cache(lambda num, prompt=False: self._render(chat[:num], tools, prompt))
        text = render(len(chat))
        encoded = self._backend.encode(text, add_special_tokens=False)
        tokens, ends = encoded.ids, [end for _, end in encoded.offsets]
        owners: list[int | None] = [None] * len(tokens)
        for index in (i for i, is_trained in enumerate(trains) if is_trained):
            is_same, is_answer = True, chat[index]["role"] == "assistant"
            if is_answer and index == 0:  # templates have no generation prompt without a message
                text = "nothing comes before it, so no prompt shows where it begins"
                _refuse(chat, index, f"{text}; set its weight to 0, or put a message before it")
            before, alone = render(index) if index else "", render(index + 1)
            start, limit = self._common(before, text), self._common(alone, text)
            if is_answer:
                prompt = render(index, True)
                history, start = self._common(before, prompt), self._common(prompt, text)
                is_same = start >= history
                if is_same and start < len(prompt):
                    self._warn(
                        f"generation prompts end with {prompt[start:]!r}, which this training never shows"
                    )
                elif len(prompt) == len(before):
                    self._warn(
                        "the chat template has no generation prompt, so an answer's header is a target"
                    )
                if is_same and start < len(prompt):  # an answer may begin like the rest by chance
                    parts = re.finditer(rf"\n|{self._control.pattern}", prompt[:start])
                    start = max([history, *(part.end() for part in parts)])
            first, end = bisect_right(ends, start), bisect_right(ends, limit)
            stops = [i for i in range(first, end) if tokens[i] in self.stop_tokens]
            rest = self._stop.sub("", alone[limit:])  # a template may end the conversation, too
            is_cut = bool(rest.strip()) or (is_answer and not stops and limit < len(alone))
            if is_cut or not is_same:
                what = "it" if is_same else "what precedes it"
                remedy = "change chat_template.jinja"
                if sum(trains) > 1:
                    remedy = "use a conversation_dataset with split_turns, or set tokenizer.train_on_last"
                text = f"the chat template renders {what} otherwise once more follows; {remedy}"
                _refuse(chat, index, text)
            if is_answer and not stops:
                config = self._path / "generation_config.json"
                stop_names = ", ".join(self.tokenizer.convert_ids_to_tokens(self.stop_tokens))
                text = f"it ends with {alone[-20:]!r}, with no stop token ({stop_names})"
                remedy = f"change chat_template.jinja, or add the token to eos_token_id in {config}"
                _refuse(chat, index, f"{text}; {remedy}")
            for i in range(first, stops[-1] + 1 if is_answer else end):
                owners[i] = index
        return list(zip(tokens, owners, strict=True))

    def _common(self, one: str, other: str) -> int:
        """Returns the number of equal first characters, up to a whole control token."""
        if other.startswith(one):
            return len(one)
        pairs = enumerate(zip(one, other, strict=False))
        end = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
        for text in (one, other):
            for token in self._control.finditer(text, max(end - 99, 0), end + 99):
                if token.start() < end < token.end():
                    end = token.start()
        return end

    def _prove(self, chat: Chat, trains: list[bool], tools: Any, owned: Owned) -> None:
        """Proves for the first message of each kind that it is independent of others.

        Changes one of its texts after the other. It must be rendered, and only targets of its own
        turn may change: raises SampleError otherwise.
        """
        for index, message in enumerate(chat):
            keys = [key for key in TEXT_KEYS if message.get(key)]
            types = [(key, type(message[key])) for key in keys]
            kind = (message["role"], *types, trains[index], index + 1 == len(chat), tools is None)
            for key in () if kind in self._proved else keys:
                changed = [*chat]
                changed[index] = {**message, key: _changed(message[key])}
                now = self._targets(changed, trains, tools)
                is_history = message["role"] == "assistant" and not trains[index]
                if now == owned and not is_history:
                    _refuse(
                        chat, index, f"the chat template leaves its {key} out; remove the {key}"
                    )
                if _outside(index, now, trains[index]) != _outside(index, owned, trains[index]):
                    text = f"its {key} changes tokens or targets of other turns"
                    _refuse(chat, index, f"{text}; change chat_template.jinja")
            self._proved.add(kind)
        if tools and "tools" not in self._proved:
            if self._targets(chat, trains, _changed(tools)) == owned:
                raise SampleError("the chat template leaves tools out; remove them")
            self._proved.add("tools")


def _stops_of_generation(path: Path) -> list[int]:
    """Returns ``eos_token_id`` of ``generation_config.json``; without one, of ``config.json``."""
    for file in (path / "generation_config.json", path / "config.json"):
        ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return []


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _refuse(chat: Chat, index: int, text: str) -> NoReturn:
    raise SampleError(f"turn {index} ({chat[index]['role']}): {text}")


def _changed(value: Any) -> Any:
    """Returns a value with other texts."""
    if isinstance(value, Mapping):
        return {k: v if k in _NOTEXT_KEYS else _changed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_changed(each) for each in value]
    return f"{value} x" if isinstance(value, str) else value


def _outside(index: int, owned: Owned, is_trained: bool) -> Owned:
    """Returns what is outside a trained message; for another message all targets."""
    excluded = index if is_trained else None
    return [(token, owner) for token, owner in owned if owner != excluded]
