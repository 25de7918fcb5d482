"""Rows of rollout files as answers: tokens, which of them the policy sampled, and what stands beside each.

Example: ``{"prompt_ids": [1, 7], "completion_ids": [9, 4, 2], "mask": [1, 0, 1], "logprobs": [-0.1, -2.3], "reward": 1}`` is an
answer whose token 4 is the output of a tool::

    tokens     1    7    9    4    2
    mask       0    0    1    0    1      trained
    logprobs   0    0 -0.1    0 -2.3      beside the token whose they are

Shapes: t tokens, of which c are the answer's and n are trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from recipe_utils.policy.rollout_keys import Rollout
from recipe_utils.text.conversations.file_rows import ImagesOfRows, after_system, with_images
from recipe_utils.text.conversations.messages import Conversation, as_turns
from recipe_utils.text.conversations.schema import IGNORE, shown
from recipe_utils.text.conversations.template import HistoryChangesError
from recipe_utils.text.images.sample import ImageInputs
from recipe_utils.text.images.sources import open_image
from recipe_utils.text.torchtune_messages import tokenize_conversation
from recipe_utils.update_steps.samples import SampleError

_OF_GROUPS = ("prompt", "prompt_ids", "messages", "system", "tools", "images", "group", "step", "policy_version")
"""Fields that hold for all answers of a group; of the others, a list has a value for each."""
_TYPES_OF_GROUPS = {"completion": (str, list), "completion_ids": (list,), "tokens": (list,)}
"""Fields of which a row of a group has a list, and the types of its values."""
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
    images: ImageInputs | None = None
    """What a model takes beside the tokens if the data have images."""

    @property
    def num_trained(self) -> int:
        """Returns the number of trained tokens."""
        return int(self.mask.sum())

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Returns the numbers of all tokens, of the answer's and of the trained ones."""
        return len(self.tokens), len(self.tokens) - self.num_prompt, self.num_trained

    @property
    def keys(self) -> np.ndarray:
        """Returns tokens [t], with numbers below 0 for placeholders, which are equal if the images are."""
        return self.tokens if self.images is None else self.images.keys_of(self.tokens)

    @property
    def num_to_last_image(self) -> int:
        """Returns the number of tokens up to the last one of an image; 0 without images."""
        return 0 if self.images is None else self.images.num_to_last


def rows_of_answers(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns a row for each answer of a group, with what holds for all of them; or the row, if it is that of one answer.

    Raises SampleError for a group that is not whole.
    """
    if not is_group(row):
        return [_unshifted(row) if "loss_fn_inputs" in row else row]
    fields = Rollout.names()
    lists = {
        key: values
        for key, values in row.items()
        if isinstance(values, list)
        and fields.get(key) not in (None, *_OF_GROUPS)
        # An empty list has no answers, or is as absent.
        and (values or fields[key] in Rollout.may_be_empty())
    }
    if len({*map(len, lists.values())}) > 1:
        listed = ", ".join(f"{len(values)} {key}" for key, values in lists.items())
        raise SampleError(f"the group is not whole: it has {listed}; write one of each for every answer")
    return [{**row, **dict(zip(lists, values, strict=True))} for values in zip(*lists.values(), strict=True)]


def is_group(row: Mapping[str, Any]) -> bool:
    """Returns True for a row with several answers to one prompt."""
    for key, values in row.items():
        types = _TYPES_OF_GROUPS.get(Rollout.names().get(key, ""), ())
        if isinstance(values, list) and values and isinstance(values[0], types):
            return True
    return False


def read_rollout(row: Mapping[str, Any]) -> Rollout:
    """Returns the keys of an answer; raises SampleError for content that would be lost."""
    keys = Rollout.of(row)
    # Numbers beside tokens within an object that is not read, such as {"sampling_params": {"temperature": 0.5}}.
    for key, value in keys.others.items():
        for name in value if isinstance(value, Mapping) else ():
            field = Rollout.names().get(name)
            if field in (*_BESIDE, "mask") and field not in keys.used and value[name] not in (None, 1):
                text = f"it would be lost; write {field} in the row, {IGNORE.format(key)}"
                raise SampleError(f"{key}.{name}={shown(value[name])}: {text}")
    return keys


def conversation_of(keys: Rollout) -> Conversation:
    """Returns the turns of a row, beside token ids those with images alone, and the images of either."""
    turns, answer = keys.messages, keys.completion
    if turns is None and keys.prompt is not None:
        turns = as_turns(keys.prompt, "user")
        turns = turns if answer is None else as_turns(answer, "assistant").behind(turns.chat)
    if turns is None:
        return Conversation([], [], images=keys.images)
    return with_images(after_system(keys.system, turns), keys.images, keys.tools, {}, keys.others)


def answer_of(keys: Rollout, tokenizer: Any, images: ImagesOfRows, truncates: bool = False) -> Answer:
    """Returns the answer of a row, or one of its answers.

    An answer of more than ``tokenizer.max_seq_len`` tokens is cut at its end if ``truncates``; the prompt never is. Raises
    SampleError for content that is missing, of another length, or in another place.
    """
    conversation = images.of(conversation_of(keys))
    tokens, num_prompt, mask, of_images = _tokens_of(keys, conversation, tokenizer)
    knows_prompt = num_prompt > 0 and "messages" not in keys.used and (mask is None or bool(mask.any()))
    if keys.mask is not None:
        mask = _of_all_tokens("mask", keys, len(tokens), num_prompt)
    elif mask is None:
        mask = np.arange(len(tokens)) >= num_prompt
    # Padding is no token of the answer; it is removed once all that stands beside tokens is read.
    is_token = np.ones(len(tokens), dtype=bool)
    if keys.attention_mask is not None:
        is_token = _of_all_tokens("attention_mask", keys, len(tokens), num_prompt)
    first = num_prompt if knows_prompt else int(mask.argmax())
    answer = Answer(tokens, mask & is_token, int(is_token[:first].sum()), knows_prompt)
    if answer.mask[is_token][:1].any():
        text = "the first token is trained, and no token before it predicts it; write a prompt, or set its mask to 0"
        raise SampleError(text)
    # Numbers beside tokens, of whatever part of the tokens the file has them.
    beside = {name: _beside(name, keys, answer, num_prompt)[is_token] for name in _BESIDE if name in keys.used}
    tokens, mask = tokens[is_token], answer.mask[is_token]
    if of_images is not None:
        of_images = of_images.at(np.flatnonzero(is_token))
    elif conversation.images is not None:
        opened = [open_image(each, conversation.image_folder) for each in conversation.images]
        of_images = tokenizer.images.inputs_beside(tokens, opened)
        if (are_trained := mask & (of_images.identities < 0)).any():
            raise SampleError(f"token {are_trained.argmax()} is of an image, and is trained; set its mask to 0")
    answer = Answer(tokens, mask, answer.num_prompt, knows_prompt, beside, keys.reward, keys.rollout, of_images)
    return _fitted(answer, tokenizer.max_seq_len, truncates)


# ---- Tokens -------------------------------------------------------------------------------------


def _tokens_of(
    keys: Rollout, conversation: Conversation, tokenizer: Any
) -> tuple[np.ndarray, int, np.ndarray | None, ImageInputs | None]:
    """Returns tokens [t], the number of the prompt's, and of texts the mask [t] and what is beside images.

    Of ids, the mask is a key.
    """
    names, tokens, prompt_ids, answer_ids = keys.used, keys.tokens, keys.prompt_ids, keys.completion_ids
    if tokens is not None:
        num_answer = keys.response_length
        if num_answer is None and answer_ids is not None:
            num_answer = len(answer_ids)
        if num_answer is None and (prompt_ids is not None or keys.mask is not None):
            num_answer = len(tokens) - (0 if prompt_ids is None else len(prompt_ids))
        if not isinstance(num_answer, int) or not 0 <= num_answer <= len(tokens):
            text = f"which of its {len(tokens)} {names['tokens']} are the answer is unknown; write mask"
            raise SampleError(f"{text}, or prompt_ids and completion_ids")
        return tokens, len(tokens) - num_answer, None, None
    if answer_ids is not None:
        if prompt_ids is None:
            raise SampleError("it has an answer without a prompt; write prompt_ids")
        return np.concatenate([prompt_ids, answer_ids]), len(prompt_ids), None, None
    if keys.messages is None and None in (keys.prompt, keys.completion):
        found = ", ".join(sorted(names.values())) or "nothing"
        has_prompt = {"prompt", "prompt_ids"} & names.keys()
        problem = "it has a prompt without an answer" if has_prompt else "it has no rollout"
        raise SampleError(
            f"{problem} (of the keys of rollouts: {found}); write prompt_ids and completion_ids, or texts"
        )
    # Texts: the chat template's tokens, of which those of the answer are trained, with its stop token.
    for key, value in keys.reasons_of_cut().items():
        text = "its text is not known as complete, and its stop token would be trained"
        raise SampleError(f"{key}={value}: {text}; write token ids, remove it, {IGNORE.format(key)}")
    try:
        token_ids, is_masked, of_images = tokenize_conversation(tokenizer, conversation)
    except HistoryChangesError as error:
        remedy = "write a row for each turn of the assistant, with what precedes it as prompt and one value of rollout"
        raise SampleError(f"{error.problem}; {remedy}, or token ids") from None
    mask = ~np.asarray(is_masked)
    return np.asarray(token_ids), int(mask.argmax()) if mask.any() else len(mask), mask, of_images


def _of_all_tokens(field: str, keys: Rollout, num_tokens: int, num_prompt: int) -> np.ndarray:
    """Returns a mask of all tokens, or of the answer, as that of all tokens [t]; the prompt is no padding, and not trained."""
    given, key = getattr(keys, field), keys.used[field]
    if len(given) not in (num_tokens, num_tokens - num_prompt):
        text = f"{len(given)} {key} for {num_tokens} tokens, {num_tokens - num_prompt} of them the answer's"
        raise SampleError(f"{text}; write one for each token of either")
    return np.append(np.full(num_tokens - len(given), field == "attention_mask"), given)


def _fitted(answer: Answer, most: int | None, truncates: bool) -> Answer:
    """Returns an answer of at most ``most`` tokens."""
    if most is None or len(answer.tokens) <= most:
        return answer
    text = f"it has {len(answer.tokens)} tokens, more than tokenizer.max_seq_len={most}"
    num_kept = max(int(answer.mask.argmax()), answer.num_to_last_image)
    if num_kept >= most:
        what = "the prompt's, or up to its last image, which are never cut"
        raise SampleError(f"{text}, {num_kept} of them {what}; set max_seq_len higher")
    if not truncates:
        raise SampleError(f"{text}; set it higher, or dataset.truncates_answers=True to cut answers at their end")
    beside = {name: numbers[:most] for name, numbers in answer.beside.items()}
    images = None if answer.images is None else answer.images.at(np.arange(most))
    return replace(answer, tokens=answer.tokens[:most], mask=answer.mask[:most], beside=beside, images=images)


# ---- Beside tokens ------------------------------------------------------------------------------


def _beside(name: str, keys: Rollout, answer: Answer, num_prompt: int) -> np.ndarray:
    """Returns the numbers of a field beside tokens [t], 0 where nothing is trained.

    A file has one for all, one for each token, for each of the answer's, or for each trained one. Raises SampleError for
    another number of them, for any that is not finite, and for log-probabilities beside the token before their own.
    """
    numbers, key, is_log_prob = getattr(keys, name), keys.used[name], name.endswith("logprobs")
    mask, found = answer.mask, np.zeros(len(answer.mask))
    num_tokens, num_trained = len(mask), int(mask.sum())
    # How many there are tells which tokens they are of.
    if isinstance(numbers, float):
        found[mask] = numbers
    elif len(numbers) in (num_tokens, num_tokens - num_prompt):
        if is_log_prob and len(numbers) == num_tokens:
            _check_place(numbers, mask, key)
        found[mask] = np.append(np.zeros(num_tokens - len(numbers)), numbers)[mask]
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
    moved = {name: [0, *values] for name, values in inputs.items()}
    rest = {name: value for name, value in given.items() if name not in ("loss_fn_inputs", "model_input")}
    return {**rest, **moved, "tokens": [*first, *targets[-1:]], "mask": [0, *mask]}


def _data(value: Any) -> list[Any]:
    """Returns a list, or that of Tinker's tensors and chunks of tokens."""
    if isinstance(value, Mapping):
        if "chunks" in value:
            return [token for chunk in value["chunks"] for token in chunk["tokens"]]
        value = value.get("data")
    return value if isinstance(value, list) else []
