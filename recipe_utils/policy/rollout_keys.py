"""Keys of rollouts in files as tools write them: each is used, known as harmless, judged by its form, or refused.

Example: ``{"group_index": 3, "tokens": [1, 7, 9, 4, 2], "response_length": 2, "rollout_log_probs": [-0.1, -2.3], "reward": 1.0,
"status": "completed"}``, as slime writes it, has the answer 4 2 to the prompt 1 7 9 in group 3, which is whole.
``python -m recipe_utils.policy.rollout_keys`` prints the table of the page.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BeforeValidator, PlainValidator, ValidationInfo

from recipe_utils.text.conversations.file_rows import Images
from recipe_utils.text.conversations.messages import Tools, Turns, read_text_or_turns, read_tools, read_turns
from recipe_utils.text.conversations.schema import MEDIA, Keys, joined, known_as, parsed, shown, table_of
from recipe_utils.text.images.sources import num_images_in
from recipe_utils.update_steps.samples import SampleError

_COMPLETE = {
    "stop", "stopped", "eos", "eos_token", "end_turn", "end_of_turn", "stop_sequence", "stop_token", "stop_word",
    "complete", "completed", "finish", "finished", "done", "success", "succeeded", "ok", "tool_call", "tool_calls",
    "tool_use", "function_call",
}  # fmt: skip
"""Words of engines for an answer that ended by itself. Any other may be of one that was cut."""

_IS_WHOLE = re.compile("(^|_)(completed?|finished|stopped|ended|done)(_|$)", re.IGNORECASE)
_IS_CUT = re.compile("(^|_)(cut|truncated|aborted|interrupted|incomplete|unfinished)(_|$)", re.IGNORECASE)
"""Names of further marks, true or false, of answers that ended by themselves, and of others."""


def _ending(value: Any) -> str:
    """Returns the reason of an ending that may be of a cut answer, otherwise "".

    ``{"type": "length"}`` and ``FinishReason.LENGTH`` are ``length``.
    """
    word = value.get("type", value.get("reason")) if isinstance(value, Mapping) else value
    name = word.rsplit(".", 1)[-1].strip().lower().replace("-", "_") if isinstance(word, str) else ""
    return "" if name in _COMPLETE else shown(value)


def _stop(value: Any) -> str:
    """Returns the same of vLLM's ``stop_reason``, which may be the number of the token that ended the answer."""
    return "" if isinstance(value, int) and not isinstance(value, bool) else _ending(value)


def _cut(value: Any) -> str:
    """Returns the same of a mark of answers that were cut."""
    if value not in (0, 1):
        raise SampleError("set it to true or false")
    return shown(value) if value else ""


def _array_of(kinds: str, what: str, values: Any) -> np.ndarray:
    """Returns a list as array [n] whose dtype is one of ``kinds``; raises SampleError for any other value."""
    with suppress(ValueError, OverflowError):  # of lists in lists, and numbers above 64 bits
        array = np.asarray(values)
        if array.ndim == 1 and (array.dtype.kind in kinds or not array.size):
            return array
    raise SampleError(f"it is no list of {what}; write one")


def _token_ids(values: Any) -> np.ndarray:
    return _array_of("iu", "integers", values).astype(np.int64)


def _numbers(values: Any) -> np.ndarray:
    """Returns a list of numbers as fp64 [n]; null is NaN."""
    if isinstance(values, list) and None in values:
        values = [np.nan if each is None else each for each in values]
    return _array_of("biuf", "numbers", values).astype(np.float64)


def _number_or_numbers(values: Any) -> float | np.ndarray:
    return float(values) if isinstance(values, int | float) else _numbers(values)


def _mask(values: Any) -> np.ndarray:
    """Returns numbers 0 and 1 as bool [n]."""
    numbers = _numbers(values)
    if not (is_known := np.isin(numbers, (0, 1))).all():
        raise SampleError(f"it contains {numbers[~is_known][0]:g}; set each to 0 or 1")
    return numbers == 1


def _reward(value: Any) -> float:
    if not isinstance(value, int | float) or not np.isfinite(value):
        raise SampleError("set it to a finite number")
    return float(value)


def _unless_ids(read: Callable[[Any], Any]) -> PlainValidator:
    """Returns the validator of a field that is not read beside token ids, unless it has images; it is then None."""

    def validate(value: Any, info: ValidationInfo) -> Any:
        has_ids = any(info.data.get(name) is not None for name in ("tokens", "completion_ids"))
        return None if has_ids and not _has_images(value) else read(value)

    return PlainValidator(validate)


def _has_images(value: Any) -> bool:
    turns = parsed(value)
    return isinstance(turns, list) and num_images_in([turn for turn in turns if isinstance(turn, Mapping)]) > 0


TokenIds = Annotated[np.ndarray | None, PlainValidator(_token_ids)]
Mask = Annotated[np.ndarray | None, PlainValidator(_mask)]
Numbers = Annotated[float | np.ndarray | None, PlainValidator(_number_or_numbers)]
Text = Annotated[str | Turns | None, _unless_ids(read_text_or_turns)]


class Rollout(Keys):
    """One answer: a row, or what a row of a group has of it."""

    prompt_ids: TokenIds = known_as("tokens before the answer", "prompt_ids", "prompt_tokens", "prompt_token_ids")
    completion_ids: TokenIds = known_as(
        "tokens of the answer, with its stop token if the policy sampled one",
        "completion_ids", "completion_tokens", "completion_token_ids", "response_ids", "response_tokens",
        "response_token_ids", is_empty=True,
    )  # fmt: skip
    tokens: TokenIds = known_as("tokens of prompt and answer", "tokens", "token_ids", "input_ids")
    prompt: Text = known_as("text of the user, or messages; beside token ids only their images are read", "prompt")
    completion: Text = known_as(
        "text of the assistant, or messages; a list of them in a row of a group; not read beside token ids",
        "completion", "completions", "response", "responses", is_empty=True,
    )  # fmt: skip
    messages: Annotated[Turns | None, _unless_ids(read_turns)] = known_as(
        "whole conversation, whose assistant turns are trained unless their `weight` is 0", "messages", "conversation"
    )
    system: Annotated[str | None, BeforeValidator(joined)] = known_as(
        "first turn of texts: text, or a list of text parts", "system", "system_prompt", "system_message"
    )
    tools: Annotated[Tools, _unless_ids(read_tools)] = known_as(
        "tools of the chat template", "tools", "functions", "available_tools"
    )
    images: Images = known_as(
        "those of the prompt, as in [chats](../recipe_utils/text/README.md#chat-templates); beside token ids one for each image in them",
        "images", "image",
    )  # fmt: skip
    mask: Mask = known_as(
        "1 for each token that the policy sampled, 0 for others, such as outputs of tools: of all tokens, or of the answer",
        "mask", "loss_mask", "completion_mask", "response_mask", "tool_mask", "env_mask", is_empty=True,
    )  # fmt: skip
    attention_mask: Mask = known_as(
        "0 for each token that is padding, which is removed with all that is beside it: of all tokens, or of the answer",
        "attention_mask", "attention_masks",
    )  # fmt: skip
    response_length: Any = known_as("number of the last of `tokens` that are the answer", "response_length")
    logprobs: Annotated[np.ndarray | None, PlainValidator(_numbers)] = known_as(
        "log-probability of each sampled token in the policy that sampled it",
        "logprobs", "log_probs", "old_log_probs", "old_logprobs", "rollout_log_probs", "sampling_logprobs", is_empty=True,
    )  # fmt: skip
    ref_logprobs: Annotated[np.ndarray | None, PlainValidator(_numbers)] = known_as(
        "the same in a reference or teacher",
        "ref_logprobs", "ref_log_probs", "teacher_logprobs", "teacher_log_probs", is_empty=True,
    )  # fmt: skip
    reward: Annotated[float | None, PlainValidator(_reward)] = known_as("a number", "reward", "rewards")
    advantage: Numbers = known_as("a number, or one for each token", "advantage", "advantages", is_empty=True)
    group: Any = known_as(
        "answers to one prompt have equal values in a file; without it, rows that follow each other with equal prompts "
        "are a group",
        "group", "group_id", "group_index", "prompt_idx",
    )  # fmt: skip
    step: Any = known_as("part of the group's name, if a file has several steps of a training", "step")
    rollout: Any = known_as("rows of a group with equal values are parts of one answer", "rollout", "rollout_id")
    temperature: Numbers = known_as(
        "divided the sampler's logits (1): a number, or one for each token", "temperature", "temperatures"
    )
    finish_reason: Annotated[str | None, PlainValidator(_ending)] = known_as(
        "a text that is not known as complete (`stop`, `eos`, `end_turn`, `completed`, `tool_calls`, ...) is refused, because "
        "its stop token would be trained", "finish_reason", "finish_reasons",
    )  # fmt: skip
    status: Annotated[str | None, PlainValidator(_ending)] = known_as("the same", "status", "statuses")
    stop_reason: Annotated[str | None, PlainValidator(_stop)] = known_as(
        "the same, without a `finish_reason`; or the token that ended the answer", "stop_reason", "stop_reasons"
    )
    truncated: Annotated[str | None, PlainValidator(_cut)] = known_as(
        "true if a text was cut, which is refused; so are `was_cut: true`, `completed: false` and the like",
        "truncated",
        "is_truncated",
        "aborted",
    )
    policy_version: Any = known_as("harmless", "policy_version", "policy_versions")
    model_input: Any = known_as("Tinker's tokens but the last", "model_input")
    loss_fn_inputs: Any = known_as(
        "Tinker's `target_tokens`, `logprobs`, `advantages` and `mask` or `weights`, each beside the token before its own",
        "loss_fn_inputs",
    )  # fmt: skip
    lost: ClassVar = {**MEDIA, "weight": "write mask", "weights": "write mask"}

    def reasons_of_cut(self) -> dict[str, str]:
        """Returns the keys, with their values, by which the answer may have been cut, also of marks: ``"was_cut": true``."""
        fields = ("finish_reason", "status", "truncated", *(["stop_reason"] if self.finish_reason is None else []))
        found = {self.used[field]: getattr(self, field) for field in fields if field in self.used}
        for key, value in self.others.items():
            is_cut, is_whole = bool(_IS_CUT.search(key)), bool(_IS_WHOLE.search(key))
            if isinstance(value, bool) and (is_cut or is_whole) and value == is_cut:
                found[key] = shown(value)
        return {key: reason for key, reason in found.items() if reason}


if __name__ == "__main__":
    print(table_of({"row": Rollout}))  # noqa: T201
