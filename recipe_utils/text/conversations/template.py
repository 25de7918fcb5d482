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
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from recipe_utils.text.conversations.messages import Chat, Tools, content_as_text
from recipe_utils.text.conversations.schema import THINKING
from recipe_utils.update_steps.samples import SampleError

Alike = dict[tuple[str, ...], tuple[int, int, int]]
"""Number of messages between equal texts, and characters of a turn before and behind their values."""
Render = Callable[..., str]
"""Maps messages, tools and ``prompt=False`` to their text; raises SampleError if the template fails."""
Encoded = tuple[np.ndarray, np.ndarray]
"""Tokens of a text, and the end of each in it [characters], int64 [n] each."""
_LABELS = {"role", "type", "id", "index", "tool_call_id"}
"""Keys of messages and calls that templates need not print."""


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


class ChatTemplate:
    """Chat template, with text ``source``, of the folder ``path``.

    ``stop_tokens`` are ids of tokens that end a generation, and their texts; ``control_tokens`` are texts of added tokens
    that the template prints. ``warn`` logs a text, once.
    """

    def __init__(
        self,
        render: Render,
        source: str,
        stop_tokens: Mapping[int, str],
        control_tokens: Sequence[str],
        path: Path,
        warn: Callable[[str], None],
    ) -> None:
        self.render, self._source, self._path, self._warn = render, source, path, warn
        self._stop_ids, self._stop_names = np.array([*stop_tokens]), [*stop_tokens.values()]
        self._stop = any_of(self._stop_names)
        self._control = any_of([*self._stop_names, *control_tokens])
        self._inspected: set[str] = set()  # what was searched for a warning, once

    def fitted(self, chat: Chat, tools: Tools) -> Chat:
        """Returns messages whose contents the template prints as text.

        Lists of parts, and None, stay as they are if the template has branches for them. Otherwise the
        texts of the parts are joined, and None becomes an empty text.
        """
        if all(isinstance(message.get("content"), str) for message in chat):
            return chat
        plain = [{**message, "content": content_as_text(message.get("content"))} for message in chat]
        # The form of which the template prints more values, and less of Python's.
        mark, scores = _unused_mark(str(chat)), []
        for form in (chat, plain):
            marked, _, leaves = _with_marks(form, None, mark)
            try:
                text = self.render(marked, tools)
            except SampleError:
                text = ""
            contents = [message.get("content") for message in marked]
            is_python = any(isinstance(content, list) and str(content) in text for content in contents)
            shown = {leaf[:2] for n, leaf in enumerate(leaves) if f"{mark}{n}⟫" in text}
            scores.append((0 if is_python else len(shown), -text.count("None")))
        return chat if scores[0] >= scores[1] else plain

    def targets(
        self, chat: Chat, trains: Sequence[bool], tools: Tools, encode: Callable[[str], Encoded], alike: Alike
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a conversation, and the index of the message whose targets they are, or -1; int64 [n] each.

        ``trains`` has one item per message. An assistant's turn starts where the generation prompt ends, and ends after
        its last stop token. Other messages train as a whole. A token belongs to the message of its last character.

        Messages between equal texts start and end alike. Of these, only the first, second, fourth,
        eighth, ... are rendered. ``alike`` keeps them, for beginnings of one conversation.

        Raises:
            SampleError: the template does not determine the targets; the error names the turn.
        """
        text = self.render(chat, tools)
        printed = self._printed(chat, tools, text)
        tokens, ends = encode(text)
        owners = np.full(len(tokens), -1)
        turns: dict[int, range] = {}  # characters of the targets of a message
        # From characters to tokens; what a template prints behind the stop token is no target.
        for index, start, limit in self._turns(chat, trains, tools, text, printed, alike):
            first, last = np.searchsorted(ends, [start, limit], side="right")
            if chat[index]["role"] == "assistant":
                stops = np.flatnonzero(np.isin(tokens[first:last], self._stop_ids))
                if len(stops) == 0:
                    names = ", ".join(self._stop_names)
                    problem = f"it ends with {text[start:limit][-20:]!r}, with no stop token ({names})"
                    remedy = "change chat_template.jinja, or add the token to eos_token_id in"
                    _refuse(chat, index, f"{problem}; {remedy} {self._path / 'generation_config.json'}")
                last = first + stops[-1] + 1
            if first < last:
                owners[first:last] = index
                turns[index] = range(int(ends[first - 1]) if first else 0, int(ends[last - 1]))
        # Which tokens are targets is known; now each value must be among its own turn's.
        if printed is None:
            self._check_one_by_one(chat, trains, tools, text, turns)
        else:
            self._check(chat, trains, text, turns, printed)
        return tokens, owners

    def _turns(
        self,
        chat: Chat,
        trains: Sequence[bool],
        tools: Tools,
        text: str,
        printed: Sequence[Printed] | None,
        alike: Alike,
    ) -> Iterator[tuple[int, int, int]]:
        """Yields index, start and limit [characters] of trained messages."""
        render = cache(lambda num, prompt=False: self.render(chat[:num], tools, prompt))
        trained = [i for i, is_trained in enumerate(trains) if is_trained]
        frames = _frames(chat, text, printed or (), {*trained})
        for index in trained:
            frame, begin, end = frames.get(index, ((), 0, 0))
            num_alike, num_before, num_behind = alike.get(frame, (0, 0, 0))
            if num_alike & (num_alike - 1):  # neither 0 nor a power of two
                start, limit = begin - num_before, end + num_behind
            else:
                # The turn ends where the text of the conversation up to it ends.
                alone = text if index + 1 == len(chat) else render(index + 1)
                limit, is_answer = self._common(alone, text), chat[index]["role"] == "assistant"
                # It starts where the prompt before it ends.
                is_same = True
                if is_answer and index == 0:
                    first = next((p.begin for p in printed or () if p.leaf.message == 0), limit)
                    start = self._start_of_greeting(alone, render, first)
                    if start < 0:
                        self._warn("an assistant's first message, which no prompt precedes, is not trained")
                        continue
                elif is_answer:
                    start, is_same = self._start_of_answer(index, render, text)
                else:
                    start = self._common(render(index), text) if index else 0
                rest = self._stop.sub("", alone[limit:])  # a template may end the conversation, too
                has_stop = not is_answer or self._stop.search(text, start, limit)
                if not is_same or rest.strip() or (not has_stop and limit < len(alone)):
                    changed = "it" if is_same else "what precedes it"
                    remedy = "change chat_template.jinja"
                    if len(trained) > 1:
                        remedy = "use a conversation_dataset with split_turns, or set tokenizer.train_on_last"
                    problem = f"the chat template renders {changed} otherwise once more follows"
                    _refuse(chat, index, f"{problem}; {remedy}")
                self._report_empty_thinking(chat[:index], tools, text, start, printed)
            if frame:
                alike[frame] = num_alike + 1, begin - start, limit - end
            yield index, start, limit

    def _start_of_answer(self, index: int, render: Callable[..., str], text: str) -> tuple[int, bool]:
        """Returns where an answer starts in ``text``, and False if its history is rendered otherwise there."""
        prompt: str = render(index, True)
        start = self._common(prompt, text)
        if start == len(prompt):
            if "prompt" not in self._inspected and len(render(index)) == start:
                self._warn("the chat template has no generation prompt, so an answer's header is a target")
            self._inspected.add("prompt")
            return start, True
        history = self._common(render(index), prompt)
        if start < history:
            return start, False
        self._warn(f"generation prompts end with {prompt[start:]!r}, which this training never shows")
        # An answer may begin like the rest by chance.
        parts = re.finditer(rf"\n|{self._control.pattern}", prompt[:start])
        return max([history, *(part.end() for part in parts)]), True

    def _start_of_greeting(self, alone: str, render: Callable[..., str], first: int) -> int:
        """Returns where a conversation's first message starts if it is an assistant's: behind the prompt of a second one.

        Returns -1 if that is not what precedes its first value, at ``first``.
        """
        try:
            prompt: str = render(1, True)
        except SampleError:  # templates may expect a user's message
            return -1
        header = prompt.removeprefix(alone)
        start = alone.find(header, 0, first) + len(header)
        return start if header and header != prompt and start >= len(header) else -1

    def _report_empty_thinking(
        self, history: Chat, tools: Tools, text: str, start: int, printed: Sequence[Printed] | None
    ) -> None:
        """Warns of targets that start with an empty block, which the template prints for lack of thinking."""
        block = re.match(r"\s*<(\w+)>\s*</\1>\s*", text[start : start + 99])
        if block is None or "thinking" in self._inspected:
            return
        index = len(history)
        begin = next((p.begin for p in printed or () if p.leaf.message == index), 0)
        if begin < start + block.end():  # the message contains it
            return
        self._inspected.add("thinking")
        remedy = "no variable of the chat template moves it to the prompt"
        for name in sorted({*re.findall(r"\b\w*think\w*\b", self._source)}):
            with_it = self.render(history, tools, True, {name: False})
            if with_it.rstrip().endswith(block[0].strip()):
                remedy = f"set tokenizer.template_variables.{name} to False to make it a part of the prompt"
                break
        self._warn(f"answers without thinking start with {block[0]!r}, which is a target; {remedy}")

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

    def _printed(self, chat: Chat, tools: Tools, text: str) -> list[Printed] | None:
        """Returns where ``text``, the rendering, has each value; None if a value changes more than that.

        Raises SampleError if the template prints Python's text of a list or a mapping.
        """
        mark = _unused_mark(text)
        marked_chat, marked_tools, leaves = _with_marks(chat, tools, mark)
        try:
            marked = self.render(marked_chat, marked_tools)
        except SampleError:  # a template may compute with a number
            return None
        if "{'" in marked or "['" in marked:
            _refuse_text_of_python(marked_chat, marked_tools, marked)
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
        missing = sorted({*range(len(leaves))} - {*map(int, pieces[::2])})
        return [*printed, *(Printed(leaves[number], -1, -1) for number in missing)]

    def _check(
        self, chat: Chat, trains: Sequence[bool], text: str, turns: Mapping[int, range], printed: Sequence[Printed]
    ) -> None:
        """Raises SampleError unless each value is printed whole, and not among the targets of another turn."""
        order = sorted(turns, key=lambda index: turns[index].start)
        starts = [turns[index].start for index in order]
        for leaf, begin, end in printed:
            index = leaf.message
            if end < 0:
                self._take_left_out(chat, trains, leaf)
            elif index is not None:
                at = bisect_right(starts, end - 1) - 1
                owner = order[at] if at >= 0 and end <= turns[order[at]].stop else None
                is_outside = index in turns and owner is None and not leaf.is_name
                if is_outside or owner not in (None, index):
                    _refuse_change_of_others(chat, index, leaf.key)
                may_be_cut = index not in turns and chat[index]["role"] == "assistant"
                kind = f"the {leaf.key} of a message ({chat[index]['role']})"
                is_known = may_be_cut or kind in self._inspected
                if not is_known and not _is_shown(leaf.value, text, begin, end):
                    self._inspected.add(kind)
                    self._warn(f"the chat template cuts or changes {kind}, such as {leaf.value.strip()[:40]!r}")

    def _take_left_out(self, chat: Chat, trains: Sequence[bool], leaf: Leaf) -> None:
        """Raises SampleError for a value that is not printed; earlier thinking and names may be left out."""
        index, key = leaf.message, leaf.key
        if index is None:
            if leaf.is_name:
                raise SampleError("the chat template leaves tools out; remove them")
        elif key == "name":
            if chat[index]["role"] != "tool":
                self._warn(f"the chat template leaves the name of a {chat[index]['role']} out")
        elif chat[index]["role"] != "assistant" or trains[index]:
            _refuse(chat, index, f"the chat template leaves its {key} out; remove the {key}")
        elif key not in THINKING:
            self._warn(f"the chat template leaves the {key} of earlier turns out")

    def _check_one_by_one(
        self, chat: Chat, trains: Sequence[bool], tools: Tools, text: str, turns: Mapping[int, range]
    ) -> None:
        """Checks as :meth:`_check` by changing one value after the other, for templates that print more than values."""
        mark = _unused_mark(text)
        for number, leaf in enumerate(_with_marks(chat, tools, mark)[2]):
            changed = self.render(*_with_marks(chat, tools, mark, only=number)[:2])
            index = leaf.message
            if changed == text:
                self._take_left_out(chat, trains, leaf)
            elif index is not None:
                start = num_common(text, changed)
                end = len(text) - num_common(text[start:][::-1], changed[start:][::-1])
                turn = turns.get(index, range(len(text)))
                in_other = any(start < t.stop and t.start < end for i, t in turns.items() if i != index)
                is_outside = not turn.start <= start <= end <= turn.stop
                if in_other or (is_outside and not leaf.is_name):
                    _refuse_change_of_others(chat, index, leaf.key)


def any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern of texts, the longest first; without texts it matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _refuse(chat: Chat, index: int, text: str) -> NoReturn:
    raise SampleError(f"turn {index} ({chat[index]['role']}): {text}")


def _refuse_change_of_others(chat: Chat, index: int, key: str) -> NoReturn:
    _refuse(chat, index, f"its {key} changes tokens or targets of other turns; change chat_template.jinja")


def _refuse_text_of_python(chat: Chat, tools: Tools, text: str) -> None:
    """Raises SampleError if ``text`` contains ``str`` of a list or mapping that JSON writes otherwise."""

    def is_shown(value: Any) -> bool:
        if not isinstance(value, list | Mapping) or not value:
            return False
        inner = value.values() if isinstance(value, Mapping) else value
        return str(value) in text or any(map(is_shown, inner))

    remedy = "change chat_template.jinja to print it with the filter tojson"
    for index, message in enumerate(chat):
        for key, value in message.items():
            if is_shown(value):
                _refuse(chat, index, f"the chat template prints its {key} as a list or mapping of Python; {remedy}")
    if is_shown(tools):
        raise SampleError(f"the chat template prints tools as a list or mapping of Python; {remedy}")


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
    for form in (plain, json.dumps(plain)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1]):
        before = text[max(end - 3 * len(form) - 999, 0) : end]
        if "".join(before.split()).endswith("".join(form.split())):
            return True
    return False


def _frames(
    chat: Chat, text: str, printed: Sequence[Printed], indices: set[int]
) -> dict[int, tuple[tuple[str, ...], int, int]]:
    """Returns for messages the texts between their values and the neighbors', and where their values begin and end.

    The first message has none, nor has one beside a value that is not text as it is.
    """
    shown = [leaf for leaf in printed if leaf.end >= 0]
    frames: dict[int, tuple[tuple[str, ...], int, int]] = {}
    for index, group in groupby(range(len(shown)), lambda at: shown[at].leaf.message):
        if index not in indices or index is None or index in frames:
            continue
        first, *rest = group
        last = [first, *rest][-1]
        around = [_extent(shown[at], text) for at in (first - 1, first, last)]
        around.append(_extent(shown[last + 1], text) if last + 1 < len(shown) else (len(text), 0))
        if first and None not in around:
            (_, before), (begin, _), (_, end), (behind, _) = (extent or (0, 0) for extent in around)
            roles = [message["role"] for message in chat[index - 1 : index + 2]]
            frames[index] = (*roles, text[before:begin], text[end:behind]), begin, end
    return frames


def _extent(printed: Printed, text: str) -> tuple[int, int] | None:
    """Returns where a text begins and ends with its white space, as far as that is printed; None for other values."""
    leaf, begin, end = printed
    if not isinstance(leaf.value, str) or text[begin:end] != (plain := leaf.value.strip()):
        return None
    before, behind = leaf.value.split(plain, 1)
    begin -= len(before) if text.endswith(before, 0, begin) else 0
    return begin, end + (len(behind) if text.startswith(behind, end) else 0)


def _unused_mark(text: str) -> str:
    return next(mark for n in count() if (mark := f"⟪{n}:") not in text)


def _with_marks(chat: Chat, tools: Tools, mark: str, only: int | None = None) -> tuple[Chat, Tools, list[Leaf]]:
    """Returns messages and tools with a numbered mark behind each value, and the values by number.

    White space at the end of a text follows its mark. Other values are replaced by marks. With ``only``, no
    other value changes, and a number or boolean becomes another one. Only names and descriptions of tools are marked,
    because templates translate the rest.
    """
    # Values are numbered in the order of their keys, so that two calls give a value the same number.
    leaves: list[Leaf] = []

    def marked(index: int | None, key: str, value: Any, is_name: bool = False) -> Any:
        if isinstance(value, Mapping):
            return {name: marked(index, key, inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [marked(index, key, inner) for inner in value]
        plain = value.rstrip() if isinstance(value, str) else ""
        if isinstance(value, str) and not plain:
            return value
        leaves.append(Leaf(index, key, value, is_name))
        if only is not None and only != len(leaves) - 1:
            return value
        if only is not None and isinstance(value, int | float):
            return not value if isinstance(value, bool) else value + 1
        number = f"{mark}{len(leaves) - 1}⟫"
        return plain + number + (value[len(plain) :] if isinstance(value, str) else "")

    def marked_call(index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        function["name"] = marked(index, "tool_calls", function["name"], True)
        function["arguments"] = marked(index, "tool_calls", function["arguments"])
        return {**call, "function": function}

    def marked_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
        if "function" in tool:
            return {**tool, "function": marked_tool(tool["function"])}
        texts = [key for key in ("name", "description") if isinstance(tool.get(key), str)]
        return {**tool, **{key: marked(None, "tools", tool[key], key == "name") for key in texts}}

    # Roles and ids stay as they are: templates branch on them.
    marked_chat: Chat = []
    for index, message in enumerate(chat):
        changed = dict(message)
        for key in [key for key in message if key not in _LABELS]:
            value = message[key]
            if key == "tool_calls":
                changed[key] = [marked_call(index, call) for call in value]
            elif key == "content" and isinstance(value, list):
                changed[key] = [{**part, "text": marked(index, key, part["text"])} for part in value]
            elif value is not None:
                changed[key] = marked(index, key, value, key == "name")
        marked_chat.append(changed)
    return marked_chat, tools and [marked_tool(tool) for tool in tools], leaves
