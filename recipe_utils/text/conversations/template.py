"""Targets of a conversation, found by rendering its chat template.

Three renderings of a conversation of two messages:

    [user], prompt            <|im_start|>user 2 + 2?<|im_end|><|im_start|>assistant
    [user, assistant]         <|im_start|>user 2 + 2?<|im_end|><|im_start|>assistant It is 4.<|im_end|>
    the same, marked          <|im_start|>user 2 + 2?⟪0:0⟫<|im_end|><|im_start|>assistant It is 4.⟪0:1⟫<|im_end|>

The answer starts where the prompt ends, and ends after its last stop token, ``<|im_end|>``. A mark stands behind
each value. All marks are printed, so the template leaves no value out; without marks, the third text is the
second, so no value changes what is printed elsewhere.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import count, groupby, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from recipe_utils.text.conversations.messages import Chat, Conversation, content_as_text
from recipe_utils.text.conversations.schema import CONTENT, THINKING, check_not_said
from recipe_utils.text.images.sources import num_images_in
from recipe_utils.update_steps.samples import SampleError

Encoded = tuple[np.ndarray, np.ndarray]
"""Tokens of a text, and the end of each in it [characters], int64 [n] each."""
_LABELS = {"role", "type", "id", "index", "tool_call_id"}
"""Keys of messages that templates need not print."""
_MARKED = {
    "tool_calls": {"function", "name", "arguments"},
    "content": {"text"},
    "tools": {"function", "name", "description"},
}
"""Keys in these values whose values templates must print."""


_PROBE = "7Kq"
"""Content that a template prints as it is."""
Render = Callable[..., str]
"""Maps a conversation, a number of its first messages and ``prompt=False`` to a text; raises SampleError if that fails.

Arguments of calls are mappings, or their JSON text.
"""


class HistoryChangesError(SampleError):
    """Raised for a turn that the template renders otherwise once more follows; ``problem`` is the text without a remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem


class Leaf(NamedTuple):
    """Value of a message (by index), or of a tool (None), that a template must print."""

    message: int | None
    key: str
    value: Any
    is_name: bool


class Printed(NamedTuple):
    """Leaf that ends before character ``end``, or is left out (-1), and begins at ``begin`` if it is text as it is."""

    leaf: Leaf
    begin: int
    end: int


class Rendering:
    """Conversation with the texts of its first messages, without and with a mark behind each value."""

    def __init__(self, render: Render, given: Conversation, mark: str) -> None:
        self.render, self.given, self.chat, self.mark = render, given, given.chat, mark
        self.marked, self.leaves = _with_marks(given, mark)
        self.text, self.marked_text = (lru_cache(4)(partial(render, each)) for each in (given, self.marked))
        # Number of messages between equal texts, and characters of a turn before and behind their values.
        self.alike: dict[tuple[str, ...], tuple[int, int, int]] = {}
        self.of_all: list[Printed] = []  # where the text of all messages has values


class ChatTemplate:
    """Chat template, with text ``source``, of the folder ``path``; ``render`` prints with it.

    It reads ``variables``. ``stop_tokens`` are ids of tokens that end a generation, and their texts, as are ``added``
    those of added tokens; ``control_tokens`` are texts of those that the template prints. ``warn`` logs a text, once.
    """

    def __init__(
        self,
        render: Render,
        source: str,
        variables: Set[str],
        stop_tokens: Mapping[int, str],
        control_tokens: Sequence[str],
        added: Mapping[int, str],
        path: Path,
        warn: Callable[[str], None],
    ) -> None:
        self._render, self._source, self._variables, self._path, self._warn = render, source, variables, path, warn
        self._stop_tokens, self._stop = stop_tokens, any_of([*stop_tokens.values()])
        self._control = any_of([*stop_tokens.values(), *control_tokens])
        self._added = added
        self._inspected: set[str] = set()  # what was searched for a warning, once

    def fitted(self, given: Conversation) -> Rendering:
        """Returns a conversation in a form of which the template prints the values as text.

        Lists of parts, and None, stay as they are if the template has branches for them. Otherwise the texts of the
        parts are joined, and None becomes an empty text; beside images, and if the template prints lists of parts alone
        (SmolVLM's), all texts become parts. Arguments of calls become JSON text if the template prints text alone.
        """
        chat, texts = given.chat, f"{given}{self._source}"
        mark = next(mark for n in count() if (mark := f"⟪{n}:") not in texts)
        contents, arguments = [chat], [False, True][: 1 + any("tool_calls" in message for message in chat)]
        if num_images_in(chat) or not self._prints_texts:
            contents.append([*map(_with_parts, chat)])
        elif not all(isinstance(message.get("content"), str) for message in chat):
            contents.append([{**message, "content": content_as_text(message.get("content"))} for message in chat])
        scored: list[tuple[tuple[int, int], Rendering]] = []
        for as_json, content in product(arguments, contents):
            changed = [*map(_with_json_arguments, content)] if as_json else content
            form = Rendering(self._render, replace(given, chat=changed), mark)
            if len(contents) == len(arguments) == 1:
                return form
            try:
                text = form.marked_text(len(chat))
            except SampleError:
                text = ""
            # The form of which the template prints more values, and less of Python's.
            shown = {form.leaves[int(number)][:2] for number in re.findall(rf"{mark}(\d+)⟫", text)}
            score = 0 if _shown_as_python(form, len(chat), text) else len(shown), -text.count("None")
            scored.append((score, form))
            if score == (len({leaf[:2] for leaf in form.leaves if leaf.key not in THINKING or leaf[:2] in shown}), 0):
                break
        return max(scored, key=lambda each: each[0])[1]

    @cached_property
    def _prints_texts(self) -> bool:
        """Whether the content of a user may be a text."""
        with suppress(SampleError):
            return _PROBE in self._render(Conversation([{"role": "user", "content": _PROBE}], [0.0]), 1)
        return True

    def targets(
        self, conversation: Rendering, trains: Sequence[bool], encode: Callable[[str], Encoded]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of the first ``len(trains)`` messages, and the turn whose target each is, or -1; int64 [n] each.

        An assistant's turn starts where the generation prompt ends, and ends after its last stop token. Other messages
        train as a whole. A token belongs to the message of its last character. Raises SampleError, with the turn, if the
        template does not determine the targets.
        """
        chat, text = conversation.chat[: len(trains)], conversation.text(len(trains))
        printed = self._printed(conversation, len(trains), text)
        tokens, ends = encode(text)
        turns = np.full(len(tokens), -1)
        spans: dict[int, range] = {}  # characters of the targets of a message
        # From characters to tokens; what a template prints behind the stop token is no target.
        for index, start, limit in self._turns(conversation, chat, trains, text, printed):
            first, last = np.searchsorted(ends, [start, limit], side="right")
            if chat[index]["role"] == "assistant":
                first += self._is_of_prompt(
                    text, start, int(ends[first - 1]) if first else 0, tokens[:last], first, encode
                )
                while last > first and tokens[last - 1] not in self._stop_tokens:
                    last -= 1
                if last == first:
                    names = ", ".join(self._stop_tokens.values())
                    problem = f"it ends with {text[start:limit][-20:]!r}, with no stop token ({names})"
                    remedy = "change chat_template.jinja, or add the token to eos_token_id in"
                    _refuse(chat, index, f"{problem}; {remedy} {self._path / 'generation_config.json'}")
            if first < last:
                turns[first:last] = index
                spans[index] = range(int(ends[first - 1]) if first else 0, int(ends[last - 1]))
        # Which tokens are targets is known; now each value must be among its own turn's.
        exact = printed is not None
        found = self._changes(conversation, len(trains), text) if printed is None else printed
        self._check(conversation, trains, text, spans, found, exact)
        return tokens, turns

    def _is_of_prompt(
        self, text: str, start: int, end: int, tokens: np.ndarray, first: int, encode: Callable[[str], Encoded]
    ) -> bool:
        """Returns True if the ``first`` of ``tokens`` behind character ``end`` begins before ``start``, and is the prompt's.

        Control tokens may take the blanks of an answer behind them (Phi-3). Any other token that reaches over the border is
        a target, and is named once.
        """
        if end >= start or first >= len(tokens):
            return False
        if (content := self._added.get(int(tokens[first]))) is not None:
            return content in text[end:start]
        if "border" not in self._inspected:
            self._inspected.add("border")
            if len(encode(text[:start])[0]) > first:
                shown = text[end : start + 9].strip(" ")
                self._warn(
                    f"a target begins in the generation prompt, such as in {shown!r}: its tokens merge with the answer's"
                )
        return False

    def _turns(
        self, conversation: Rendering, chat: Chat, trains: Sequence[bool], text: str, printed: list[Printed] | None
    ) -> Iterator[tuple[int, int, int]]:
        """Yields index, start and limit [characters] of trained messages.

        Of those between equal texts, which start and end alike, the first, second, fourth, eighth, ... are rendered.
        """
        trained = [i for i, is_trained in enumerate(trains) if is_trained]
        frames = _frames(chat, text, printed or ())
        for index in trained:
            frame, begin, end = frames.get(index, ((), 0, 0))
            num_alike, num_before, num_behind = conversation.alike.get(frame, (0, 0, 0))
            if num_alike & (num_alike - 1):  # neither 0 nor a power of two
                start, limit = begin - num_before, end + num_behind
            else:
                # The turn ends where the text of the conversation up to it ends.
                alone = text if index + 1 == len(chat) else conversation.text(index + 1)
                limit, is_answer = self._common(alone, text), chat[index]["role"] == "assistant"
                # It starts where the prompt before it ends.
                is_same = True
                if is_answer and index == 0:
                    first = next((p.begin for p in printed or () if p.leaf.message == 0), limit)
                    start = self._start_of_greeting(alone, conversation, first)
                    if start < 0:
                        self._warn("an assistant's first message, which no prompt precedes, is not trained")
                        continue
                elif is_answer:
                    start, is_same = self._start_of_answer(index, conversation, text)
                else:
                    start = self._common(conversation.text(index), text) if index else 0
                rest = self._stop.sub("", alone[limit:])  # a template may end the conversation, too
                has_stop = not is_answer or self._stop.search(text, start, limit)
                if not is_same or rest.strip() or (not has_stop and limit < len(alone)):
                    changed = "it" if is_same else "what precedes it"
                    problem = f"the chat template renders {changed} otherwise once more follows"
                    if index + 1 == len(chat):
                        _refuse(chat, index, f"{problem}; change chat_template.jinja")
                    # A sample that ends with the turn has its history as the template renders it there.
                    remedy = "use a conversation_dataset with split_turns=True"
                    if index == trained[-1]:
                        remedy += ", or remove the turns after it"
                    elif trained[-1] + 1 == len(chat):
                        remedy += ", or set tokenizer.train_on_last=True"
                    raise HistoryChangesError(f"turn {index} ({chat[index]['role']}): {problem}", remedy)
                self._report_empty_thinking(conversation, index, text, start, printed)
            if frame:
                conversation.alike[frame] = num_alike + 1, begin - start, limit - end
            yield index, start, limit

    def _start_of_answer(self, index: int, conversation: Rendering, text: str) -> tuple[int, bool]:
        """Returns where an answer starts in ``text``, and False if its history is rendered otherwise there."""
        prompt = conversation.text(index, True)
        start = self._common(prompt, text)
        if start == len(prompt):
            if "prompt" not in self._inspected and len(conversation.text(index)) == start:
                self._warn("the chat template has no generation prompt, so an answer's header is a target")
            self._inspected.add("prompt")
            return start, True
        history = self._common(conversation.text(index), prompt)
        if start < history:
            return start, False
        self._warn(f"generation prompts end with {prompt[start:]!r}, which this training never shows")
        # An answer may begin like the rest by chance.
        parts = re.finditer(rf"\n|{self._control.pattern}", prompt[:start])
        return max([history, *(part.end() for part in parts)]), True

    def _start_of_greeting(self, alone: str, conversation: Rendering, first: int) -> int:
        """Returns where a conversation's first message starts if it is an assistant's: behind the prompt of a second one.

        Returns -1 if that is not what precedes its first value, at ``first``.
        """
        try:
            prompt = conversation.text(1, True)
        except SampleError:  # templates may expect a user's message
            return -1
        header = prompt.removeprefix(alone)
        start = alone.find(header, 0, first) + len(header)
        return start if header and header != prompt and start >= len(header) else -1

    def _report_empty_thinking(
        self, conversation: Rendering, index: int, text: str, start: int, printed: Sequence[Printed] | None
    ) -> None:
        """Warns of targets that start with an empty block, or its end, which the template prints for lack of thinking."""
        opened = re.search(r"<\w+>\s*$", text[max(start - 99, 0) : start])  # by the prompt
        before = opened[0] if opened else ""
        block = re.match(r"\s*<(\w+)>\s*</\1>\s*", before + text[start : start + 99])
        if block is None or "thinking" in self._inspected:
            return
        begin = next((p.begin for p in printed or () if p.leaf.message == index), 0)
        if begin < start + block.end() - len(before):  # the message contains it
            return
        self._inspected.add("thinking")
        remedy = "no variable of the chat template moves it to the prompt"
        for name in sorted(name for name in self._variables if "think" in name):
            given = replace(conversation.given, variables={**conversation.given.variables, name: False})
            if conversation.render(given, index, True).rstrip().endswith(block[0].strip()):
                remedy = f"set tokenizer.template_variables.{name} to False to make it a part of the prompt"
                break
        printed_text = block[0].removeprefix(before)
        self._warn(f"answers without thinking start with {printed_text!r}, which is a target; {remedy}")

    def _common(self, one: str, other: str) -> int:
        """Returns the number of equal first characters, up to a whole control token."""
        if other.startswith(one):
            return len(one)
        end = num_common(one, other)
        for text in (one, other):
            for token in self._control.finditer(text, max(end - 99, 0), end + 99):
                if token.start() < end < token.end():
                    end = token.start()
        return end

    # ---- Proof that each value is printed, and changes nothing else -----------------------------

    def _printed(self, conversation: Rendering, num: int, text: str) -> list[Printed] | None:
        """Returns where ``text``, the rendering, has each value; None if a value changes more than that.

        A text needs no marks if it begins as that of all messages, up to the value before its last message, and has
        known texts around this one's values. Only these values are returned.
        """
        chat, of_all = conversation.chat, conversation.of_all
        if num < len(chat) and of_all:
            found = [next((a for a, b in pairwise(of_all) if (b.leaf.message or 0) >= num - 1), of_all[-1])]
            own = [leaf for leaf in conversation.leaves if leaf.message == num - 1]
            for leaf in sorted(own, key=lambda leaf: leaf.key not in THINKING):
                begin = text.find(value := str(leaf.value).strip(), found[-1].end)
                found.append(Printed(leaf, begin, begin + len(value)))
            frame, *_ = _frames(chat[:num], text, found).get(num - 1, [None])
            if frame in conversation.alike and conversation.text(len(chat)).startswith(text[: found[0].end]):
                return found
        printed = self._printed_with_marks(conversation, num, text)
        if num == len(chat):
            conversation.of_all = printed or []
        return printed

    def _printed_with_marks(self, conversation: Rendering, num: int, text: str) -> list[Printed] | None:
        """Returns the same for any text. Raises SampleError if it has Python's text of a list or a mapping."""
        try:
            marked = conversation.marked_text(num)
        except SampleError:  # a template may compute with a number
            return None
        if python := _shown_as_python(conversation, num, marked):
            _refuse(conversation.chat, *python)
        leaves, mark = conversation.leaves, conversation.mark
        literal, *pieces = re.split(rf"{re.escape(mark)}(\d+)⟫", marked)
        printed, end = [], 0
        for number, following in zip(pieces[::2], pieces[1::2], strict=True):
            leaf = leaves[int(number)]
            if isinstance(leaf.value, str):
                forms = [""]
            else:  # replaced by its mark, which is quoted where the value is not
                forms = [json.dumps(leaf.value), str(leaf.value)]
                quote = re.search(r"(\\*[\"'])?$", literal)
                if quote and quote[0] and following.startswith(quote[0]):
                    literal = literal[: quote.start()]
                    following = following[len(quote[0]) :]
            form = next((f for f in forms if text.startswith(literal + f, end)), None)
            if form is None:
                return None
            end += len(literal) + len(form)
            num_shown = len(form) or len(leaf.value.strip())
            printed.append(Printed(leaf, end - num_shown, end))
            literal = following
        if text[end:] != literal:
            return None
        shown = {*map(int, pieces[::2])}
        missing = [leaf for n, leaf in enumerate(leaves) if n not in shown and (leaf.message or 0) < num]
        return [*printed, *(Printed(leaf, -1, -1) for leaf in missing)]

    def _changes(self, conversation: Rendering, num: int, text: str) -> list[Printed]:
        """Returns the part of ``text`` that each value changes, for templates that print more than values."""
        found = []
        for number, leaf in enumerate(conversation.leaves):
            if (leaf.message or 0) < num:
                given, _ = _with_marks(conversation.given, conversation.mark, only=number)
                changed = conversation.render(given, num)
                begin = num_common(text, changed)
                end = len(text) - num_common(text[begin:][::-1], changed[begin:][::-1])
                found.append(Printed(leaf, *((begin, end) if changed != text else (-1, -1))))
        return found

    def _check(
        self,
        conversation: Rendering,
        trains: Sequence[bool],
        text: str,
        spans: dict[int, range],
        printed: list[Printed],
        exact: bool,
    ) -> None:
        """Raises SampleError unless each value is printed whole, and not among the targets of another turn."""
        chat = conversation.chat
        order = sorted(spans, key=lambda index: spans[index].start)
        starts = [spans[index].start for index in order]
        for leaf, begin, end in printed:
            index = leaf.message
            if end < 0:
                shown = text[spans[index].start : spans[index].stop] if index in spans else ""
                self._take_left_out(conversation, trains, leaf, shown)
            elif index is not None:
                # Turns whose targets contain it: of those that start before its end, only the last two can.
                low = end - 1 if exact else begin
                at = bisect_left(starts, end)
                around = {turn for turn in order[max(at - 2, 0) : at] if spans[turn].stop > low}
                is_whole = index in around and spans[index].start <= low and end <= spans[index].stop
                if around - {index} or (index in spans and not is_whole and not leaf.is_name):
                    problem = f"its {leaf.key} changes tokens or targets of other turns"
                    _refuse(chat, index, f"{problem}; change chat_template.jinja")
                may_be_cut = index not in spans and chat[index]["role"] == "assistant"
                kind = f"the {leaf.key} of a message ({chat[index]['role']})"
                is_known = may_be_cut or kind in self._inspected
                if exact and not is_known and not _is_shown(leaf.value, text, begin, end):
                    self._inspected.add(kind)
                    self._warn(f"the chat template cuts or changes {kind}, such as {leaf.value.strip()[:40]!r}")

    def _take_left_out(self, conversation: Rendering, trains: Sequence[bool], leaf: Leaf, turn: str) -> None:
        """Raises SampleError for content that is not printed in its ``turn``; earlier thinking, names and others may be left out.

        The name of a call may be printed in its id, ``functions.NAME:0``, as by Kimi's templates.
        """
        index, key, chat = leaf.message, leaf.key, conversation.chat
        if index is None:
            if leaf.is_name:
                raise SampleError("the chat template leaves tools out; remove them")
        elif key == "name":
            if chat[index]["role"] != "tool":
                self._warn(f"the chat template leaves the name of a {chat[index]['role']} out")
        elif key not in CONTENT:
            if trains[index]:
                check_not_said({key: chat[index][key]}, chat[index]["role"], f"turn {index} (assistant): ")
            conversation.given.unread.setdefault(key, chat[index][key])
        elif chat[index]["role"] != "assistant" or trains[index]:
            calls = chat[index]["tool_calls"] if key == "tool_calls" and leaf.is_name else []
            ids = [str(call["id"]) for call in calls if "id" in call and call["function"]["name"] == leaf.value]
            without = [each for each in ids if each in turn and not re.search(rf"\b{re.escape(leaf.value)}\b", each)]
            if without:
                text = f"the chat template prints the id {without[0]} of a call, and not its name {leaf.value}"
                _refuse(chat, index, f"{text}; write ids as functions.{leaf.value}:0, with the place of each call")
            if not ids or not all(each in turn for each in ids):
                _refuse(chat, index, f"the chat template leaves its {key} out; remove the {key}")
        elif key not in THINKING:
            self._warn(f"the chat template leaves the {key} of earlier turns out")


def any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern of texts, the longest first; without texts it matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _refuse(chat: Chat, index: int | None, text: str) -> NoReturn:
    raise SampleError(text if index is None else f"turn {index} ({chat[index]['role']}): {text}")


def _shown_as_python(conversation: Rendering, num: int, marked_text: str) -> tuple[int | None, str] | None:
    """Returns the message (None: tools) of a list or mapping that is printed as Python's text, and what is wrong.

    That text is right where JSON has the same, ``[1, 2]``, and where calls are Python's, ``f(names=['a', 'b'])``.
    """

    def is_shown(value: Any, marked: Any, name: str = "", parent: str = "") -> bool:
        if not isinstance(value, list | Mapping) or not value:
            return False
        # A list without a mark, of a tool, may be in another text by chance.
        if (shown := str(marked)) in marked_text and (isinstance(value, Mapping) or conversation.mark in shown):
            is_of_call = parent == "arguments" and f"{name}={shown}" in marked_text
            return not is_of_call and str(value) != json.dumps(value, ensure_ascii=False)
        keys = value if isinstance(value, Mapping) else range(len(value))
        return any(is_shown(value[key], marked[key], str(key), name) for key in keys)

    problem = "as a list or mapping of Python; change chat_template.jinja to print it with the filter tojson"
    for index, (message, marked) in enumerate(zip(conversation.chat[:num], conversation.marked.chat, strict=False)):
        for key in message:
            if is_shown(message[key], marked[key], key):
                return index, f"the chat template prints its {key} {problem}"
    is_wrong = is_shown(conversation.given.tools, conversation.marked.tools)
    return (None, f"the chat template prints tools {problem}") if is_wrong else None


def num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns the number of equal first characters of two texts, or items of two lists."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _is_shown(value: Any, text: str, begin: int, end: int) -> bool:
    """Returns True if a value is printed before ``end`` as it is or in JSON, apart from white space."""
    if not isinstance(value, str) or text[begin:end] == value.strip():
        return True
    plain = value.strip()
    for form in (plain, json.dumps(plain)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1], repr(plain)[1:-1]):
        before = text[max(end - 3 * len(form) - 999, 0) : end]
        if "".join(before.split()).endswith("".join(form.split())):
            return True
    return False


def _frames(chat: Chat, text: str, printed: Sequence[Printed]) -> dict[int, tuple[tuple[str, ...], int, int]]:
    """Returns for messages the texts around their values, and where these begin and end.

    The first message has none, nor has one with a value that is not printed as it is where a text ends.
    """
    shown = [leaf for leaf in printed if leaf.end >= 0]
    frames: dict[int, tuple[tuple[str, ...], int, int]] = {}
    for index, group in groupby(range(len(shown)), lambda at: shown[at].leaf.message):
        first, *rest = group
        own, behind = shown[first : first + len(rest) + 1], shown[first + len(rest) + 1 :][:1]
        edges = [own[0], *behind]
        if index in (None, *frames) or any(text[p.begin : p.end] != str(p.leaf.value).strip() for p in edges):
            continue
        if index is not None and first:
            begins = [*(p.begin for p in own), behind[0].begin if behind else len(text)]
            between = [text[p.end : begin] for p, begin in zip(shown[first - 1 :], begins, strict=False)]
            roles = [message["role"] for message in chat[index - 1 : index + 2]]
            frames[index] = (*roles, *between), own[0].begin, own[-1].end
    return frames


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls", ()):
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def _with_marks(given: Conversation, mark: str, only: int | None = None) -> tuple[Conversation, list[Leaf]]:
    """Returns what is given with a numbered mark behind each value, and the values by number.

    White space at the end of a text follows its mark. Other values are replaced by marks. With ``only``, no
    other value changes, and a number or boolean becomes another one. Only names and descriptions of tools are marked,
    because templates translate the rest.
    """
    leaves: list[Leaf] = []

    def marked(index: int | None, key: str, value: Any, keys: Set[str] | None, name: str) -> Any:
        if name == "arguments" and keys:  # of a call; each of them is a value
            inner = marked(index, key, json.loads(value) if isinstance(value, str) else value, None, "")
            return json.dumps(inner, ensure_ascii=False) if isinstance(value, str) else inner
        if isinstance(value, Mapping):
            is_marked = {inner: keys is None or inner in keys for inner in value}
            return {k: marked(index, key, v, keys, k) if is_marked[k] else v for k, v in value.items()}
        if isinstance(value, list):
            return [marked(index, key, inner, keys, name) for inner in value]
        plain = value.rstrip() if isinstance(value, str) else ""
        if (isinstance(value, str) and not plain) or (value is None and keys):
            return value
        leaves.append(Leaf(index, key, value, name == "name" and (key == "name" or keys is not None)))
        if only is not None and only != len(leaves) - 1:
            return value
        if only is not None and isinstance(value, int | float):
            return not value if isinstance(value, bool) else value + 1
        number = f"{mark}{len(leaves) - 1}⟫"
        return plain + number + (value[len(plain) :] if isinstance(value, str) else "")

    # Roles and ids stay as they are: templates branch on them.
    chat: Chat = []
    for index, message in enumerate(given.chat):
        changed: dict[str, Any] = {}
        for key, value in message.items():
            # transformers gives one thought under several names
            same = [k for k in changed if {k, key} <= {*THINKING} and message[k] == value]
            of_all = marked(index, key, value, _MARKED.get(key), key) if key not in _LABELS and not same else value
            changed[key] = changed[same[0]] if same else of_all
        chat.append(changed)
    return replace(given, chat=chat, tools=marked(None, "tools", given.tools, _MARKED["tools"], "")), leaves
