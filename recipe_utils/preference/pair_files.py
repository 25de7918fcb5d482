"""Dataset of preference pairs in files, in the forms that their rows have.

Example: {"system": "Be brief.", "question": "2 + 2?", "chosen": "4", "rejected": "5"} is two conversations of three turns.
The turns before the answers may also be the beginning of ``chosen`` and ``rejected``. What comes before the answers,
earlier assistant turns included, is context on both sides.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from recipe_utils.preference.pairs import SIDES
from recipe_utils.text.conversations.file_datasets import tokenize_texts
from recipe_utils.text.conversations.file_rows import (
    BEFORE,
    KeyedRows,
    PairRow,
    Texts,
    after_system,
    check_no_variables,
    check_repeated,
    images_of_rows,
    judge_unread,
    lengths_of,
    name_unread_of_first,
    read_row,
    with_images,
)
from recipe_utils.text.conversations.messages import Chat, Conversation, Turns, as_turns, content_as_text
from recipe_utils.text.conversations.template import HistoryChangesError, num_common
from recipe_utils.text.images.sample import ImageInputs
from recipe_utils.text.torchtune_messages import check_no_fraction, tokenize_conversation
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.samples import SampleError


class PairDataset(Dataset[dict[str, Any]]):
    """Preference pairs of a file, in the forms that TRL takes.

    A row has ``chosen`` and ``rejected``, and may have ``prompt`` and ``tools``. Messages are in OpenAI's format, with
    or without the prompt's. Three texts, or two with a common beginning, are joined as they are, without a chat template.

    Args:
        tokenizer: a :class:`FolderTokenizer`; or one of torchtune for rows without tool calls and thinking.
        path: file or files of rows, see :class:`.PathRows`.
        split, validation_fraction: take the rows of one side, see :class:`.PathRows`.
        ignored_keys: keys of rows, turns and calls that are dropped, and would be refused for their form otherwise.
        image_folder: folder of images, see :class:`.ConversationDataset`.

    Raises:
        ValueError: a wrong split, or a file of another format.
        OSError: ``path`` cannot be read.
    """

    def __init__(
        self,
        tokenizer: Any,
        path: str | list[str],
        split: str | None = None,
        validation_fraction: float | None = None,
        ignored_keys: Sequence[str] = (),
        image_folder: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._rows = KeyedRows(PairRow, ignored_keys, path, split, validation_fraction)
        self._variables = getattr(tokenizer, "template_variables", ())
        self._images = images_of_rows(self._rows, tokenizer, image_folder, self._chosen_of)
        name_unread_of_first(self, self._rows, lambda index: _unread(self._read(index)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a pair as torchtune's preference datasets; a SampleError names the row."""
        with self._rows.naming(index):
            row = self._read(index)
            tokenized: Sequence[tuple[Sequence[int], Any, ImageInputs | None]]
            if isinstance(row, Texts):
                tokenized = [(*both, None) for both in tokenize_texts(self._tokenizer, row)]
            else:
                tokenized = self._of_messages(row)
            judge_unread(self, f"{self._rows.path}", _unread(row), lengths_of(mask for _, mask, _ in tokenized))
        sample: dict[str, Any] = {}
        for side, (tokens, mask, images) in zip(SIDES, tokenized, strict=True):
            sample[f"{side}_input_ids"] = tokens
            sample[f"{side}_labels"] = np.where(mask, IGNORE_INDEX, tokens).tolist()
            sample |= {} if images is None else {f"{side}_image_inputs": images}
        return sample

    def _chosen_of(self, row: Mapping[str, Any]) -> Conversation | Texts:
        read = read_pair(row, self._variables)
        return read if isinstance(read, Texts) else read[0]

    def _read(self, index: int) -> tuple[Conversation, Conversation] | Texts:
        row = read_pair(self._rows[index], self._variables)
        if isinstance(row, Texts):
            return self._images.of_texts(row)
        chosen, rejected = map(self._images.of, row)
        return chosen, rejected

    def _of_messages(self, sides: Sequence[Conversation]) -> list[tuple[Sequence[int], Any, ImageInputs | None]]:
        tokenized = list[tuple[Sequence[int], Any, ImageInputs | None]]()
        for name, side in zip(SIDES, sides, strict=True):
            try:
                tokenized.append(tokenize_conversation(self._tokenizer, side))
            except HistoryChangesError as error:
                remedy = "end both sides with one turn of the assistant behind the turns that they share"
                raise SampleError(f"{name}: {error.problem}; {remedy}") from error
            except SampleError as error:
                raise SampleError(f"{name}: {error}") from error
        return tokenized


def _unread(row: tuple[Conversation, Conversation] | Texts) -> dict[str, Any]:
    return row.unread if isinstance(row, Texts) else row[0].unread


def read_pair(
    row: Mapping[str, Any], variable_names: Collection[str] = ()
) -> tuple[Conversation, Conversation] | Texts:
    """Returns the conversations of a pair, of which the answers alone are trained; or its texts, if it has only texts.

    Raises SampleError if ``chosen`` or ``rejected`` is missing, where the answers begin is not certain, or a key has content
    that is in no turn.
    """
    keys, variables = read_row(PairRow, row, variable_names)
    for side in SIDES:
        if side not in keys.used:
            text = "a row has chosen and rejected, and may have what precedes them"
            raise SampleError(f"it has no {side} (its keys: {', '.join(row)}); {text}")
    sides = {side: as_turns(getattr(keys, side), "assistant") for side in SIDES}
    chosen, rejected = sides.values()
    # The prompt may be a part of both sides, or a key of its own.
    sources, prompt, name = keys.turns_before(), [], "chosen"
    for key, turns in {**sides, **sources}.items():
        check_no_fraction(turns.weights, f"{key}: ")
    for key, turns in sources.items():
        before = _without_answer(turns.chat, chosen.chat)
        if not all(has_prompt(before, side.chat) for side in sides.values()):
            prompt, name = before, key
            break
    if prompt and prompt[-1]["role"] not in BEFORE:
        for side, turns in sides.items():
            if (role := turns.chat[0]["role"]) not in ("assistant", "tool"):
                text = f"its {side} begins with a turn of the {role} that is not its prompt's"
                raise SampleError(f"{text}; let it begin with the whole prompt, or with the answer")
    check_repeated({**sources, **keys.answers()}, [*prompt, *chosen.chat, *rejected.chat], name)
    texts = tuple(answer for answer in (keys.chosen, keys.rejected) if isinstance(answer, str))
    needs_template = {"system", "messages", "question", "input", "tools"} & keys.used.keys()
    if len(texts) == len(SIDES) and not isinstance(keys.prompt, Turns) and not needs_template:
        check_no_variables(variables)
        return Texts(keys.prompt, texts, keys.others)
    # What precedes the answers is not trained: the prompt, and the turns with which both sides begin.
    most = min(len(chosen.chat), len(rejected.chat)) - 1
    num_shared = num_common(chosen.chat[:most], rejected.chat)
    context = [*prompt, *chosen.chat[:num_shared]]
    answers = (Turns(turns.chat[num_shared:], turns.weights[num_shared:]) for turns in sides.values())
    one, other = (
        with_images(after_system(keys.system, answer.behind(context)), keys.images, keys.tools, variables, keys.others)
        for answer in answers
    )
    return one, other


def _without_answer(turns: Chat, answer: Chat) -> Chat:
    """Returns the turns without those of the answer, if they end with it."""
    num = len(turns) - len(answer)
    return turns[:num] if _texts(turns[num:]) == _texts(answer) else turns


def _texts(turns: Chat) -> list[tuple[str, str]]:
    return [(turn["role"], content_as_text(turn.get("content"))) for turn in turns]


def has_prompt(prompt: Chat, side: Chat) -> bool:
    """Returns True if a side begins with the prompt's messages, perhaps after a system message."""
    texts, side_texts = _texts(prompt), _texts(side[:-1])
    num_before = next((i for i, (role, _) in enumerate(side_texts) if role not in BEFORE), 0)
    return any(side_texts[start:][: len(texts)] == texts for start in (0, num_before))
