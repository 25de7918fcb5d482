"""Rows of rollout files as answers: tokens, which of them the policy sampled, and what stands beside each.

Example: ``{"prompt_ids": [1, 7], "completion_ids": [9, 4, 2], "mask": [1, 0, 1], "logprobs": [-0.1, -2.3], "reward": 1}`` is an
answer whose token 4 is the output of a tool::

    tokens     1    7    9    4    2
    mask       0    0    1    0    1      trained
    logprobs   0    0 -0.1    0 -2.3      beside the token whose they are

Shapes: t tokens, of which c are the answer's and n are trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from recipe_utils.policy.rollout_keys import Rollout
from recipe_utils.text.conversations.file_rows import NO_COLUMNS, Columns, after_system, turns_of
from recipe_utils.text.conversations.messages import Conversation, read_tools, read_turns
from recipe_utils.text.conversations.schema import IGNORE, lists_in, shown
from recipe_utils.text.conversations.template import HistoryChangesError
from recipe_utils.text.torchtune_messages import tokenize_conversation
from recipe_utils.update_steps.samples import SampleError, whole_numbers

_OF_ANSWERS = (
    "completion", "completion_ids", "tokens", "mask", "attention_mask", "response_length", "logprobs", "ref_logprobs",
    "reward", "advantage", "rollout", "temperature", "finish_reason", "status", "stop_reason", "truncated",
)  # fmt: skip
"""Keys of which a row of a group has a list with a value for each answer."""
_BESIDE = ("logprobs", "ref_logprobs", "temperature", "advantage")
"""Keys of numbers beside tokens."""
_ROUNDING = 1e-3
"""A log-probability may be above 0 by as much."""


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt."""

    tokens: np.ndarray
    """[t] int64: prompt and answer."""
    mask: np.ndarray
    """[t] bool: True for tokens that are trained."""
    num_prompt: int
    """Number of tokens before the answer."""
    knows_prompt: bool = True
    """False if the row does not tell where the answer begins; they are then those before the first trained one."""
    beside: Mapping[str, np.ndarray] = field(default_factory=dict)
    """[t] fp64 each, 0 beside tokens that are not trained: ``logprobs``, ``ref_logprobs``, ``temperature``, ``advantage``."""
    reward: float | None = None
    rollout: Any = None
    """Answers of a group with equal ones are parts of one."""

    @property
    def num_trained(self) -> int:
        """Returns the number of trained tokens."""
        return int(self.mask.sum())


def read_rollout(row: Any, columns: Columns = NO_COLUMNS) -> Rollout:
    """Returns the keys of a row.

    Raises SampleError for a row that is no object, and for content that would be lost.
    """
    if not isinstance(row, Mapping):
        raise SampleError(f"it is a {type(row).__name__}; write one JSON object per line")
    row = columns.of(row)
    keys = Rollout.of(_unshifted(row) if "loss_fn_inputs" in row else row)
    # Numbers beside tokens within an object that is not read, such as {"sampling_params": {"temperature": 0.5}}.
    for key, value in keys.others.items():
        for name in value if isinstance(value, Mapping) else ():
            field = Rollout.names().get(name)
            if field in (*_BESIDE, "mask") and field not in keys.used and value[name] not in (None, 1):
                text = f"it would be lost; write {field} in the row, {IGNORE.format(key)}"
                raise SampleError(f"{key}.{name}={shown(value[name])}: {text}")
    return keys


def check_no_logprobs(unread: Mapping[str, Any], answers: Sequence[Answer]) -> None:
    """Raises SampleError for what is not read, and has the form of log-probabilities: one below 0 for each token."""
    lengths = {
        num for each in answers for num in (len(each.tokens), len(each.tokens) - each.num_prompt, each.num_trained)
    }
    for key, value in unread.items():
        for numbers in lists_in(value):
            is_list = isinstance(numbers, list) and len(numbers) in lengths - {0}
            if is_list and all(isinstance(each, int | float) and each <= 0 for each in numbers) and any(numbers):
                text = "numbers of at most 0, one for each token, would be lost; write log-probabilities as logprobs"
                raise SampleError(f"{key}: {text}, {IGNORE.format(key)}")


def is_group(keys: Rollout) -> bool:
    """Returns True for a row with several answers to one prompt."""
    completion = keys.completion if isinstance(keys.completion, list) else []
    return isinstance([*completion, None][0], str | list) or any(
        isinstance(value, list) and isinstance([*value, None][0], list) for value in (keys.completion_ids, keys.tokens)
    )


def answers_of_rollout(keys: Rollout, tokenizer: Any, truncates: bool = False) -> list[Answer]:
    """Returns the answers of a row: one, or those of a group.

    Answers of more than ``tokenizer.max_seq_len`` tokens are cut at their end if ``truncates``; the prompt never is. Raises
    SampleError for content that is missing, of another length, or in another place.
    """
    given = {name: getattr(keys, name) for name in keys.used}
    if not is_group(keys):
        return [_answer_of(given, keys, tokenizer, truncates)]
    # Values of the group hold for all of its answers.
    lists = {name: given.pop(name) for name in _OF_ANSWERS if isinstance(given.get(name), list)}
    sizes = {keys.used[name]: len(values) for name, values in lists.items()}
    if len({*sizes.values()}) > 1:
        listed = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise SampleError(f"the group is not whole: it has {listed}; write one of each for every answer")
    answers = []
    for index in range(max(sizes.values())):
        of_answer = {name: values[index] for name, values in lists.items() if values[index] is not None}
        if lacking := [name for name in (*_BESIDE, "reward") if name in lists.keys() - of_answer.keys()]:
            remedy = "remove the answer, or score it" if lacking == ["reward"] else "write it"
            raise SampleError(f"answer {index}: the group is not whole: its {keys.used[lacking[0]]} is null; {remedy}")
        try:
            answers.append(_answer_of({**given, **of_answer}, keys, tokenizer, truncates))
        except SampleError as error:
            raise SampleError(f"answer {index}: {error}") from None
    return answers


def _answer_of(given: Mapping[str, Any], keys: Rollout, tokenizer: Any, truncates: bool) -> Answer:
    """Returns one answer of values by field, of a row with ``keys``."""
    names = keys.used
    tokens, num_prompt, mask = _tokens_of(given, keys, tokenizer)
    knows_prompt = num_prompt > 0 and "messages" not in given and (mask is None or bool(mask.any()))
    mask = _mask_of(given, names, tokens, num_prompt, mask)
    # Padding is no token of the answer; it is removed once all that stands beside tokens is read.
    is_token = np.ones(len(tokens), dtype=bool)
    if "attention_mask" in given:
        numbers = _zeros_and_ones(given["attention_mask"], names["attention_mask"], len(tokens), num_prompt)
        is_token[len(tokens) - len(numbers) :] = numbers == 1
    first = num_prompt if knows_prompt else int(mask.argmax())
    answer = Answer(tokens, mask & is_token, int(is_token[:first].sum()), knows_prompt)
    if answer.mask[is_token][:1].any():
        text = "the first token is trained, and no token before it predicts it; write a prompt, or set its mask to 0"
        raise SampleError(text)
    # Numbers beside tokens, of whatever part of the tokens the file has them.
    beside = {name: _beside(name, given[name], names[name], answer, num_prompt) for name in _BESIDE if name in given}
    reward = given.get("reward")
    if reward is not None and (not isinstance(reward, int | float) or not np.isfinite(reward)):
        raise SampleError(f"{names['reward']}={shown(reward)}: set it to a finite number")
    if not is_token.all():
        beside = {name: numbers[is_token] for name, numbers in beside.items()}
        answer = replace(answer, tokens=tokens[is_token], mask=answer.mask[is_token])
    answer = replace(
        answer, beside=beside, reward=None if reward is None else float(reward), rollout=given.get("rollout")
    )
    return _fitted(answer, tokenizer.max_seq_len, truncates)


# ---- Tokens -------------------------------------------------------------------------------------


def _tokens_of(given: Mapping[str, Any], keys: Rollout, tokenizer: Any) -> tuple[np.ndarray, int, np.ndarray | None]:
    """Returns tokens [t], the number of the prompt's, and of texts the mask [t]; of ids it is a key."""
    names = keys.used
    if "tokens" in given:
        tokens = whole_numbers(given, "tokens", names["tokens"])
        num_answer = given.get("response_length", len(given["completion_ids"]) if "completion_ids" in given else None)
        if num_answer is None and ("prompt_ids" in given or "mask" in given):
            num_answer = len(tokens) - len(given.get("prompt_ids", ()))
        if not isinstance(num_answer, int) or not 0 <= num_answer <= len(tokens):
            text = f"which of its {len(tokens)} {names['tokens']} are the answer is unknown; write mask"
            raise SampleError(f"{text}, or prompt_ids and completion_ids")
        return tokens, len(tokens) - num_answer, None
    if "completion_ids" in given:
        if "prompt_ids" not in given:
            raise SampleError("it has an answer without a prompt; write prompt_ids")
        prompt, answer = (whole_numbers(given, name, names[name]) for name in ("prompt_ids", "completion_ids"))
        return np.concatenate([prompt, answer]), len(prompt), None
    if "messages" not in given and not {"prompt", "completion"} <= given.keys():
        found = ", ".join(sorted(names[name] for name in given)) or "nothing"
        has_prompt = {"prompt", "prompt_ids"} & given.keys()
        problem = "it has a prompt without an answer" if has_prompt else "it has no rollout"
        raise SampleError(
            f"{problem} (of the keys of rollouts: {found}); write prompt_ids and completion_ids, or texts"
        )
    # Texts: the chat template's tokens, of which those of the answer are trained, with its stop token.
    for key in ("finish_reason", "status", "truncated", *(["stop_reason"] if "finish_reason" not in given else [])):
        ends = given.get(key, [])
        if cut := [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None and end.is_cut]:
            text = (
                "its text is not known as complete, and its stop token would be trained; write token ids, or remove it"
            )
            raise SampleError(f"{names[key]}={cut[0].reason}: {text}")
    if "messages" in given:
        chat, weights = read_turns(given["messages"])
    else:
        chat, _ = turns_of(given["prompt"], "user", "prompt")
        answers, of_answers = turns_of(given["completion"], "assistant", names["completion"])
        chat, weights = [*chat, *answers], [*[0.0] * len(chat), *of_answers]
    chat, weights = after_system(given.get("system"), chat, weights)
    try:
        tools = read_tools(given.get("tools"))
        token_ids, is_masked = tokenize_conversation(tokenizer, Conversation(chat, weights, tools, unread=keys.others))
    except HistoryChangesError as error:
        remedy = "write a row for each turn of the assistant, with what precedes it as prompt and one value of rollout"
        raise SampleError(f"{error.problem}; {remedy}, or token ids") from None
    mask = ~np.asarray(is_masked)
    return np.asarray(token_ids), int(mask.argmax()) if mask.any() else len(mask), mask


def _mask_of(
    given: Mapping[str, Any], names: Mapping[str, str], tokens: np.ndarray, num_prompt: int, mask: np.ndarray | None
) -> np.ndarray:
    """Returns the mask [t] of the row: of all tokens, or of the answer; by default the answer's tokens are trained."""
    num_tokens = len(tokens)
    if "mask" not in given:
        return np.arange(num_tokens) >= num_prompt if mask is None else mask
    numbers = _zeros_and_ones(given["mask"], names["mask"], num_tokens, num_prompt)
    sampled = np.zeros(num_tokens, dtype=bool)
    sampled[num_tokens - len(numbers) :] = numbers == 1
    return sampled


def _zeros_and_ones(values: Any, key: str, num_tokens: int, num_prompt: int) -> np.ndarray:
    """Returns a mask of all tokens, or of the answer, as fp64."""
    numbers = _numbers(values, key)
    if len(numbers) not in (num_tokens, num_tokens - num_prompt):
        text = f"{len(numbers)} {key} for {num_tokens} tokens, {num_tokens - num_prompt} of them the answer's"
        raise SampleError(f"{text}; write one for each token of either")
    if not np.isin(numbers, (0, 1)).all():
        raise SampleError(f"{key} contains {numbers[~np.isin(numbers, (0, 1))][0]:g}; set each to 0 or 1")
    return numbers


def _fitted(answer: Answer, most: int | None, truncates: bool) -> Answer:
    """Returns an answer of at most ``most`` tokens."""
    if most is None or len(answer.tokens) <= most:
        return answer
    text = f"it has {len(answer.tokens)} tokens, more than tokenizer.max_seq_len={most}"
    num_prompt = int(answer.mask.argmax())
    if num_prompt >= most:
        raise SampleError(f"{text}, {num_prompt} of them the prompt's, which is never cut; set max_seq_len higher")
    if not truncates:
        raise SampleError(f"{text}; set it higher, or dataset.truncates_answers=True to cut answers at their end")
    beside = {name: numbers[:most] for name, numbers in answer.beside.items()}
    return replace(answer, tokens=answer.tokens[:most], mask=answer.mask[:most], beside=beside)


# ---- Beside tokens ------------------------------------------------------------------------------


def _beside(name: str, values: Any, key: str, answer: Answer, num_prompt: int) -> np.ndarray:
    """Returns the numbers of a field beside tokens [t], 0 where nothing is trained; ``key`` is its name in the file.

    A file has one for each token, for each of the answer's, or for each trained one; one for all is no log-probability.
    Raises SampleError for another number of them, for any that is not finite, and for log-probabilities beside the token
    before their own.
    """
    is_one, is_log_prob = isinstance(values, int | float), name.endswith("logprobs")
    mask, numbers = answer.mask, _numbers([values] if is_one else values, key)
    num_tokens, num_trained, found = len(mask), int(mask.sum()), np.zeros(len(mask))
    # How many there are tells which tokens they are of.
    if is_one and is_log_prob:
        raise SampleError(f"{key}={values:g}: one number for {num_trained} trained tokens; write one for each")
    if is_one:
        found[mask] = values
    elif len(numbers) == num_tokens:
        if is_log_prob:
            _check_place(numbers, mask, key)
        found[mask] = numbers[mask]
    elif len(numbers) == num_tokens - num_prompt:
        found[mask] = np.append(np.zeros(num_prompt), numbers)[mask]
    elif len(numbers) == num_trained:
        found[mask] = numbers
    else:
        text = f"{len(numbers)} {key} for {num_tokens} tokens, {num_tokens - num_prompt} of them the answer's, "
        text += f"{num_trained} trained; write one for each trained token"
        if len(numbers) == num_tokens - 1:
            text += " (all but one: beside the token before its own? Then put 0 before the first)"
        raise SampleError(text)
    # Numbers that no sampler returns are errors of its kernels, or of the file.
    if not (is_finite := np.isfinite(found)).all():
        place = int((~is_finite).argmax())
        raise SampleError(f"{key}: token {place} has {found[place]}; remove the answer, or sample it again")
    if name == "temperature" and not (found[mask] > 0).all():
        raise SampleError(
            f"{key} contains {found[mask].min():g}, and divides logits; set it above 0 (greedy answers: 1)"
        )
    if is_log_prob and (found > _ROUNDING).any():
        raise SampleError(f"{key} contains {found.max():g}; logarithms of probabilities are at most 0")
    return found


def _check_place(numbers: np.ndarray, mask: np.ndarray, key: str) -> None:
    """Raises SampleError if numbers [t] of all tokens stand beside the token before their own."""
    trained = np.flatnonzero(mask)
    if not len(trained):
        return
    first, last = trained[0], trained[-1]
    before, at_end = numbers[first - 1], numbers[last]
    if np.isfinite(before) and before != 0 and at_end == 0 and not numbers[: first - 1].any():
        text = f"token {first - 1}, the last before the answer, has {before:g}, and token {last}, its last one, has 0"
        raise SampleError(f"{key} are beside the token before their own: {text}; move them by one")


def _unshifted(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Tinker's row with everything beside its own token.

    ``model_input`` [1, 7, 9] with ``target_tokens`` [7, 9, 2] are tokens [1, 7, 9, 2], and ``logprobs`` [0, -0.1, -2.3] become
    [0, 0, -0.1, -2.3].
    """
    inputs = {name: _data(value) for name, value in given["loss_fn_inputs"].items()}
    first, targets = _data(given.get("model_input")), inputs.pop("target_tokens", [])
    if len(first) != len(targets) or first[1:] != targets[:-1]:
        raise SampleError("target_tokens are not those of model_input moved by one; write the row as the client does")
    mask = inputs.pop("mask", inputs.pop("weights", None))
    if mask is None:
        raise SampleError("loss_fn_inputs has no mask, so which tokens the policy sampled is unknown; write it")
    if unknown := inputs.keys() - {"logprobs", "advantages"}:
        raise SampleError(f"loss_fn_inputs.{min(unknown)}: it would be lost; remove it")
    for name, values in {**inputs, "mask": mask}.items():
        if len(values) != len(targets):
            raise SampleError(
                f"loss_fn_inputs.{name}: {len(values)} for {len(targets)} target_tokens; write one for each"
            )
    moved = {name.removesuffix("s") if name == "advantages" else name: [0, *values] for name, values in inputs.items()}
    rest = {name: value for name, value in given.items() if name not in ("loss_fn_inputs", "model_input")}
    return {**rest, **moved, "tokens": [*first, *targets[-1:]], "mask": [0, *mask]}


def _data(value: Any) -> list[Any]:
    """Returns a list, or that of Tinker's tensors and chunks of tokens."""
    if isinstance(value, Mapping):
        if "chunks" in value:
            return [token for chunk in value["chunks"] for token in chunk["tokens"]]
        value = value.get("data")
    return value if isinstance(value, list) else []


def _numbers(values: Sequence[Any], key: str) -> np.ndarray:
    """Returns a list of numbers as fp64 [n]; null is NaN."""
    try:
        read = np.asarray(values)
        numbers = read.astype(np.float64)
    except (TypeError, ValueError):
        raise SampleError(f"{key}={shown(values)}: it is no list of numbers") from None
    # A list of texts is an array of texts; one with null an array of objects.
    is_text = read.dtype.kind == "U" or (read.dtype.kind == "O" and any(isinstance(each, str) for each in values))
    if numbers.ndim != 1 or is_text:
        raise SampleError(f"{key}={shown(values)}: it is no list of numbers")
    return numbers
