r"""Rows of files as conversations.

Example: {"system_prompt": "Be brief.", "instruction": "Add.", "input": "2, 2", "output": "4"} is a turn of the system, one of
the user, "Add.\n2, 2", and one of the assistant, which is trained. {"prompt": "2 + 2?", "messages": [...]} is the
conversation of ``messages``, if that contains the prompt. ``python -m recipe_utils.text.conversations.file_rows`` prints the
table of the page from the keys of :class:`FileRow`, :class:`.Turn` and :class:`.Call`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn, TypeVar

import numpy as np
from pydantic import BeforeValidator, PlainValidator, ValidationInfo

from recipe_utils.text.conversations.messages import (
    Call,
    Chat,
    Conversation,
    Tools,
    Turn,
    Turns,
    as_turns,
    content_as_text,
    read_text_or_turns,
    read_tools,
    read_turns,
)
from recipe_utils.text.conversations.paths import PathRows
from recipe_utils.text.conversations.schema import (
    CALLS,
    MEDIA,
    ROLES,
    THINKING,
    WEIGH,
    Keys,
    check_lists,
    check_no_label,
    joined,
    known_as,
    parsed,
    shown,
    table_of,
    without_keys,
)
from recipe_utils.text.images.sources import Source, check_no_marks, images_of
from recipe_utils.torchtune_names import log_rank_zero
from recipe_utils.update_steps.samples import SampleError

BEFORE = ("system", "developer")
"""Roles of messages that come before the first turn."""


def _input(value: Any) -> str | Turns:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else read_text_or_turns(value)


def _answer(value: Any, info: ValidationInfo) -> str | Turns:
    """Returns an answer, which may be calls beside tools, or their JSON text."""
    if info.data.get("tools") and _are(value, "name"):
        return read_turns([{"role": "assistant", "content": None, "tool_calls": value}])
    return read_text_or_turns(value)


def _images(value: Any) -> list[Source]:
    return value if isinstance(value, list) else [value]


Images = Annotated[list[Source] | None, PlainValidator(_images)]
Row = TypeVar("Row", bound="FileRow")
TextOrTurns = Annotated[str | Turns | None, PlainValidator(read_text_or_turns)]


class FileRow(Keys):
    """A row of a file of conversations. Of the keys before an answer, those that repeat another are compared."""

    messages: Annotated[Turns | None, PlainValidator(read_turns)] = known_as(
        "turns, as a list or its JSON text", "messages", "conversations", "conversation", "texts"
    )
    system: Annotated[str | None, BeforeValidator(joined)] = known_as(
        "first turn: text, or a list of text parts", "system", "system_prompt", "system_message"
    )
    tools: Annotated[Tools, PlainValidator(read_tools)] = known_as(
        "a list, one tool, or JSON text", "tools", "functions", "available_tools"
    )
    prompt: TextOrTurns = known_as("a turn of the user, or turns", "prompt")
    question: TextOrTurns = known_as("a turn of the user, or turns", "question", "query", "instruction")
    input: Annotated[str | Turns | None, PlainValidator(_input)] = known_as(
        "text behind the question, on a line of its own; or turns", "input", "context"
    )
    completion: Annotated[str | Turns | None, PlainValidator(_answer)] = known_as(
        "answer, or turns; behind the text of a `prompt`, both are trained without a chat template, as TRL does",
        "completion", is_empty=True,
    )  # fmt: skip
    answer: Annotated[str | Turns | None, PlainValidator(_answer)] = known_as(
        "answer of the assistant, or its calls", "output", "response", "answer", "answers", is_empty=True
    )
    images: Images = known_as(
        'one for each part `{"type": "image"}`, or for each `<image>` in texts; else in front of the first text of the user',
        "images", "image",
    )  # fmt: skip
    chat_template_kwargs: dict[str, Any] | None = known_as(
        "variables of the chat template (`false`, not its text); so is each key that the template reads, such as `documents`",
        "chat_template_kwargs",
    )
    lost: ClassVar = {
        **dict.fromkeys(("train", "trainable", "loss_mask", "train_detail", "weights"), WEIGH), **MEDIA,
        **dict.fromkeys(THINKING, "write it as reasoning_content of an assistant's message"),
        "weight": "write it in the messages, or set dataset.weight", "loss_weight": "set dataset.loss_weight",
        "history": "write its turns in messages", "documents": "the chat template reads no documents; write them in messages",
        "tool_calls": "write them in a message of the assistant", "function_call": "write it in a message of the assistant",
        "objects": "write boxes and names of objects in the texts, as the model reads them",
    }  # fmt: skip

    def turns_before(self) -> dict[str, Turns]:
        """Returns the turns before the answer by the key that has them; the first are to be used, others to be compared."""
        is_alone = not {"messages", "prompt"} & self.used.keys()
        if is_alone and isinstance(self.question, str) and isinstance(self.input, str):
            return {self.used["question"]: as_turns(f"{self.question}\n{self.input}", "user")}
        return self._turns_of("user", "messages", "prompt", "input", "question")

    def answers(self) -> dict[str, Turns]:
        """Returns the turns of each key with an answer."""
        return self._turns_of("assistant", "completion", "answer")

    def _turns_of(self, role: str, *fields: str) -> dict[str, Turns]:
        return {self.used[field]: as_turns(getattr(self, field), role) for field in fields if field in self.used}


class PairRow(FileRow):
    """A row of a file of pairs."""

    chosen: TextOrTurns = known_as(
        "better answer of a pair, with or without the turns before it", "chosen", is_empty=True
    )
    rejected: TextOrTurns = known_as("worse answer", "rejected", is_empty=True)


@dataclass(frozen=True)
class Texts:
    """Texts that are joined as they are, without a chat template; the prompt, which may be None, is not trained."""

    prompt: str | None
    answers: tuple[str, ...]
    unread: dict[str, Any]
    """What is not read of the row, by its key."""


class KeyedRows(PathRows):
    """Rows of files that have the keys of a model, with decisions about all of them.

    A column of JSON texts of messages has messages if up to 128 rows, from all over the files, have no other text in it; an
    answer that is JSON, because it was asked for, is a text otherwise. The log tells which.

    Args:
        model: keys of the rows.
        ignored: keys that are dropped.
        path, split, validation_fraction: see :class:`.PathRows`.
    """

    def __init__(
        self,
        model: type[Keys],
        ignored: Collection[str],
        path: str | Sequence[str],
        split: str | None = None,
        validation_fraction: float | None = None,
    ) -> None:
        super().__init__(path, split, validation_fraction)
        if isinstance(ignored, str):
            raise ValueError(f"ignored_keys={ignored}: it is a text; set it to a list, [{ignored}]")
        self._ignored, self._json = ignored, list[str]()
        # Numbers of texts, and of those in JSON.
        numbers = {name: [0, 0] for name, field in model.names().items() if field in _TURNS}
        for index in self.first():
            with suppress(Exception):  # any: raised again with the sample
                row = self[index]
                for name in numbers.keys() & row.keys():
                    if isinstance(text := row[name], str) and text:
                        numbers[name][0] += 1
                        numbers[name][1] += turns_in(text) is not text
        for name, (num, num_json) in numbers.items():
            if num_json:
                what = "messages" if num == num_json else f"texts ({num_json} of {num} could be messages)"
                log_rank_zero(f"{path}: JSON texts of {name} are read as {what}")
        self._json = [name for name, (num, num_json) in numbers.items() if num == num_json > 0]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Returns a row with messages, and without dropped keys; raises SampleError for a text where all others are JSON."""
        row = super().__getitem__(index)
        read = {key: turns_in(row[key]) for key in self._json if isinstance(row.get(key), str)}
        for key, value in read.items():
            if isinstance(value, str) and value:
                text = "other rows have JSON texts of messages here; write messages in all rows, or texts"
                raise SampleError(f"{key}={shown(value)}: {text}")
        changed: Mapping[str, Any] = without_keys({**row, **read} if read else row, self._ignored)
        return changed

    def first(self) -> range:
        """Returns the indices of up to 128 rows, from all over the files."""
        return range(0, len(self), max(len(self) // 64, 1))


_TURNS = ("prompt", "question", "completion", "answer", "chosen", "rejected", "input")
"""Fields of texts, or of messages."""


def turns_in(value: Any) -> Any:
    """Returns the messages of a JSON text of messages; other values as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith("[") or not _are(value, "role", "from"):
        return value
    turns = parsed(value)
    return turns if all(turn.get("role", turn.get("from")) in {*ROLES, *CALLS} for turn in turns) else value


def read_row(
    model: type[Row], row: Mapping[str, Any], variable_names: Collection[str] = ()
) -> tuple[Row, dict[str, Any]]:
    """Returns the keys of a row, and the values of those that the template reads as ``variable_names``.

    Raises SampleError for content that would be lost.
    """
    names = (row.keys() & {*variable_names}) - model.names().keys()
    keys = model.of({key: value for key, value in row.items() if key not in names})
    check_no_label(keys.others)
    variables = keys.chat_template_kwargs or {}
    if unknown := variables.keys() - {*variable_names}:
        text = "the chat template reads no such variable; correct its name"
        raise SampleError(f"chat_template_kwargs.{min(unknown)}: {text}")
    variables = {**{key: row[key] for key in row if key in names and row[key] is not None}, **variables}
    for name, value in variables.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise SampleError(f"{name}={value!r}: a text, which counts as true; write {value.lower()} without quotes")
    return keys, variables


def conversation_of(row: Mapping[str, Any], variable_names: Collection[str] = ()) -> Conversation | Texts:
    """Returns the conversation of a row, or its texts if it has those of a prompt and a completion alone.

    Raises SampleError with what was found instead, and for a key with content that is in no turn.
    """
    keys, variables = read_row(FileRow, row, variable_names)
    given = keys.used.keys() | keys.others.keys() & {"chosen", "rejected"}
    if given == {"prompt", "completion"} and isinstance(keys.prompt, str) and isinstance(keys.completion, str):
        check_no_variables(variables)
        return Texts(keys.prompt, (keys.completion,), keys.others)
    sources, answers = keys.turns_before(), keys.answers()
    if not sources or not (answers or "messages" in given):
        _refuse(row, keys)
    # Turns before an answer with a key of its own are not trained; what repeats others is compared with them.
    name = next(iter(sources))
    turns = sources.pop(name)
    if answers and turns.chat[-1]["role"] != "assistant":
        turns = answers.pop(next(iter(answers))).behind(turns.chat)
    turns = after_system(keys.system, turns)
    check_repeated({**sources, **answers}, turns.chat, name)
    return with_images(turns, keys.images, keys.tools, variables, keys.others)


def with_images(
    turns: Turns, given: Sequence[Source] | None, tools: Tools, variables: Mapping[str, Any], unread: dict[str, Any]
) -> Conversation:
    """Returns turns as a conversation with the images of their parts, and those ``given`` in a column, see :func:`.images_of`."""
    chat, images = images_of(turns.chat, given or ())
    return Conversation(chat, turns.weights, tools, variables, unread, images or None)


class ImagesOfRows(NamedTuple):
    """Decision of a dataset about images, for all of its rows."""

    folder: Path | None
    """Folder of those that are paths."""
    are_read: bool

    def of(self, conversation: Conversation) -> Conversation:
        """Returns a conversation with its images, none of texts; raises SampleError for one where no other row has any."""
        if conversation.images and not self.are_read:
            raise SampleError("it has an image, and other rows have none; set dataset.image_folder, to any folder")
        if not self.are_read:
            return conversation
        if not conversation.images:
            check_no_marks(conversation.chat)
        return replace(conversation, images=conversation.images or (), image_folder=self.folder)

    def of_texts(self, texts: Texts) -> Texts:
        """Returns texts, which have no images; raises SampleError if other rows do and the prompt contains ``<image>``."""
        if self.are_read:
            check_no_marks([{"role": "user", "content": texts.prompt or ""}])
        return texts


def images_of_rows(
    rows: KeyedRows, tokenizer: Any, folder: str | None, read: Callable[[Mapping[str, Any]], Conversation | Texts]
) -> ImagesOfRows:
    """Returns the decision: rows have images if there is a ``folder`` of them, or if one of up to 128 rows has one.

    ``read`` maps a row to a conversation. Raises ValueError if the tokenizer's folder has no processor of images.
    """
    have_images = False
    for index in rows.first():
        with suppress(Exception):  # any: raised again with the sample
            row = read(rows[index])
            have_images |= isinstance(row, Conversation) and bool(row.images)
    are_read = have_images or folder is not None
    if are_read and not have_images:
        text = "no image in up to 128 rows from all over the data; their key is images or image"
        log_rank_zero(f"dataset.image_folder={folder}: {text}")
    if are_read and not hasattr(tokenizer, "images"):
        raise ValueError("dataset: its rows have images; set tokenizer to a folder_tokenizer")
    return ImagesOfRows(None if folder is None else Path(folder), are_read)


def check_no_variables(variables: Mapping[str, Any]) -> None:
    """Raises SampleError for variables of the chat template beside texts that are joined without one."""
    for name, value in variables.items():
        text = "texts of a prompt and answers are joined without the chat template, which reads it; write messages"
        raise SampleError(f"{name}={shown(value)}: it would be lost: {text}")


def after_system(system: str | None, turns: Turns) -> Turns:
    """Returns turns with the system's text as the first; raises SampleError if they begin with another one."""
    if system is None:
        return turns
    first = turns.chat[0]
    if first["role"] not in BEFORE:
        return turns.behind(as_turns(system, "system").chat)
    if content_as_text(first.get("content")).strip() != system.strip():
        raise SampleError(f"system={shown(system)}: the first turn has another text of the system; remove one of them")
    return turns


def check_repeated(
    sources: Mapping[str, Turns], chat: Chat, name: str, remedy: str = "write it there, or remove it"
) -> None:
    """Raises SampleError unless each turn of ``sources`` is in the conversation, or its text in a turn of the role."""
    for key, (turns, _) in sources.items():
        for turn in turns:
            text = content_as_text(turn.get("content")).strip()
            texts = [content_as_text(other.get("content")) for other in chat if other["role"] == turn["role"]]
            if not text and turn.keys() == {"role", "content"}:
                continue
            if turn not in chat and not any(text and text in other for other in texts):
                text = f"it is in no turn of {name}, so it would be lost; {remedy}"
                raise SampleError(f"{key}={shown(turn.get('content'))}: {text}")


def name_unread_of_first(dataset: Any, rows: KeyedRows, unread_of: Callable[[int], Iterable[str]]) -> None:
    """Logs in one line the keys that ``dataset`` does not read of up to 128 rows, from all over its files."""
    keys: list[str] = []
    for index in rows.first():
        with suppress(Exception):  # any: raised again with the sample
            keys += unread_of(index)
    name_unread(dataset, f"{rows.path}", keys)


def judge_unread(
    dataset: Any, name: str, unread: Mapping[str, Any], lengths: Iterable[int], may_have_logprobs: bool = False
) -> None:
    """Logs the keys of a row that ``dataset`` does not read; raises SampleError as :func:`.check_lists`."""
    if any(isinstance(value, list) for value in unread.values()):
        check_lists(unread, {*lengths}, may_have_logprobs)
    name_unread(dataset, name, unread)


def lengths_of(masks: Iterable[Any]) -> Iterator[int]:
    """Yields the numbers of tokens and of targets of samples, whose masks [t] are True for what is no target."""
    for mask in masks:
        yield from (len(mask), len(mask) - int(np.sum(mask)))


def name_unread(dataset: Any, name: str, keys: Iterable[str]) -> None:
    """Logs the keys of a row that ``dataset`` does not read, each once for all its shallow copies."""
    named: set[str] = dataset.__dict__.setdefault("_named", set())
    if unread := [key for key in dict.fromkeys(keys) if key not in named]:
        named.update(unread)
        log_rank_zero(f"{name}: not read: {', '.join(unread)}")


def _are(value: Any, *names: str) -> bool:
    """Returns True for a list, or its JSON text, of mappings that have one of the keys each."""
    values = parsed(value)
    are_mappings = isinstance(values, list) and all(isinstance(each, Mapping) for each in values)
    return are_mappings and bool(values) and all({*names} & each.keys() for each in values)


def _refuse(row: Mapping[str, Any], keys: FileRow) -> NoReturn:
    """Raises SampleError for a row without a conversation, with what it is instead."""
    for key, field in FileRow.names().items():
        if field == "messages" and row.get(key) == []:
            raise SampleError(f"{key} is empty; remove the line")
    names = f"it has no messages (its keys: {', '.join(row)})"
    for key, text in (
        ("chosen", "a pair; set dataset to a recipe_utils.preference.pair_dataset"),
        ("parent_id", "one message of a tree; write each path from its root as messages"),
        ("contents", "of Gemini's form; write messages with role and content"),
        ("text", "a text; set dataset to a recipe_utils.text.text_pieces_dataset"),
        ("role", "one turn; write all turns of a conversation as messages of one row"),
    ):
        if key in row:
            raise SampleError(f"{names}, but is {text}")
    raise SampleError(f"{names}; rename its column, or write messages, prompt and completion, or question and answer")


def table() -> str:
    """Returns the table of keys of conversations and pairs."""
    return table_of({"row": PairRow, "turn": Turn, "call": Call})


if __name__ == "__main__":
    print(table())  # noqa: T201
