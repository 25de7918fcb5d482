"""Dataset of rollouts in files: groups of answers to one prompt.

Example: two answers of 2 and 3 tokens with rewards 1 and 0 are a sample of two sequences, whose prompt is computed once. With
``advantage: mean`` an answer has the values, which rows have beside each of its trained tokens,

==============  =============  =============  =======================================================
value           first answer   second answer  sum over the trained tokens of an update step
==============  =============  =============  =======================================================
advantages      0.5            -0.5
answers         1/2            1/3            answers
groups          1/5            1/5            groups
rewards         1/2            0              rewards, of which the mean is logged
equal_groups    0              0              groups whose rewards are all equal
==============  =============  =============  =======================================================

so that whatever divides the loss is known before the first forward, over all ranks.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from recipe_utils.policy.rollout_keys import Rollout
from recipe_utils.policy.rollout_rows import (
    Answer,
    answer_of,
    conversation_of,
    is_group,
    read_rollout,
    rows_of_answers,
)
from recipe_utils.text.conversations.file_rows import KeyedRows, images_of_rows, judge_unread, name_unread_of_first
from recipe_utils.text.conversations.paths import PathRows
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.samples import Facts, SampleError, UnusedError

# ---- Advantages of a group's answers, from their rewards -------------------------------------------

# Rewards 1, 0, 0, 0 have the mean 0.25 and the standard deviation 0.5. The advantages of the first answer and of the others
# are 0.75 and -0.25 (``mean``), 1.5 and -0.5 (``mean_std``), 1 and -0.33 (``leave_one_out``).

_EPSILON = 1e-6
"""Added to the standard deviation, as in verl; TRL adds 1e-4."""


_ROUNDING = 1e-12
"""Differences of rewards that are 0 but for rounding, in parts of the largest: 0.1 + 0.2 - 0.3."""
_LARGEST = float(np.finfo(np.float32).max) ** 0.5
"""Bound of rewards and advantages, whose squares are numbers in fp32."""


def mean(rewards: np.ndarray) -> np.ndarray:
    """Returns rewards [m] minus their mean (Dr. GRPO, arXiv:2503.20783), exactly 0 where they are equal."""
    from_first = rewards - rewards[0]
    found = from_first - from_first.mean()
    # The mean of three times 0.1 is not 0.1, and that of 0.3, 0.425 and 0.55 is not 0.425.
    return np.where(np.abs(found) <= _ROUNDING * np.abs(rewards).max(), 0.0, found)


def mean_std(rewards: np.ndarray) -> np.ndarray:
    """Returns the same over their standard deviation, with m - 1 (GRPO, arXiv:2402.03300)."""
    return mean(rewards) / (rewards.std(ddof=1) + _EPSILON)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Returns each reward minus the mean of the others (RLOO, arXiv:2402.14740)."""
    return mean(rewards) * len(rewards) / (len(rewards) - 1)


OF_REWARDS: dict[str, Callable[[np.ndarray], np.ndarray]]
OF_REWARDS = {"mean": mean, "mean_std": mean_std, "leave_one_out": leave_one_out}
"""Name in configs -> function of a group's rewards."""
ADVANTAGES = ("given", *OF_REWARDS, "teacher")


# ---- Datasets --------------------------------------------------------------------------------------

_COLUMNS = {"logprobs": "logprobs", "ref_logprobs": "ref_logprobs", "temperature": "temperatures"}
"""Key of rows -> column."""
FIELDS = ("logprobs", "ref_logprobs", "reward")
"""What all rows have or none, because it decides which models a training has beside the policy, and what is logged."""


class RolloutDataset(Dataset[dict[str, Any]]):
    """Groups of rollouts in a file, in the forms of :mod:`recipe_utils.policy.rollout_keys`.

    Args:
        tokenizer: tokenizes rows of texts; rows may contain token ids. Its ``max_seq_len`` bounds rollouts.
        path: file or files of rows, see :class:`.PathRows`. Rows of a group may be anywhere in a file.
        advantage: ``given`` by the file; or computed from the rewards of a group: ``mean``, ``mean_std``,
            ``leave_one_out``, see :data:`OF_REWARDS`; or ``teacher``: per token, log-probability of the
            reference minus that of the sampler (on-policy distillation).
        group_size: number of answers that each group must have; null allows any.
        truncates_answers: cuts answers of too long rollouts at their end; otherwise they are bad samples.
        fields: which of :data:`FIELDS` all rows have; null: those of the first row.
        ignored_keys: keys of rows, turns and calls that are dropped, and would be refused for their form otherwise.
        image_folder: folder of images, see :class:`.ConversationDataset`.

    Raises:
        ValueError: another ``advantage``, other ``fields`` than in the first row, or a file of another format.
        OSError: ``path`` cannot be read.
    """

    def __init__(
        self,
        tokenizer: Any,
        path: str | list[str],
        advantage: str = "mean_std",
        group_size: int | None = None,
        truncates_answers: bool = False,
        fields: Iterable[str] | None = None,
        ignored_keys: Sequence[str] = (),
        image_folder: str | None = None,
    ) -> None:
        check_advantage(advantage)
        self._tokenizer, self._rows = tokenizer, KeyedRows(Rollout, ignored_keys, path)
        self.advantage, self._group_size, self._truncates = advantage, group_size, truncates_answers
        self.content_hash = f"{self._rows.content_hash}, advantage={advantage}"
        self._groups = [*_groups_of(self._rows)]
        self.fields = fields_of_first(self._rows)
        """Those of :data:`FIELDS` that the first row has, and all others must have."""
        check_fields(self.fields if fields is None else fields, self.fields, path)
        self._images = images_of_rows(self._rows, tokenizer, image_folder, lambda row: conversation_of(_first_of(row)))
        name_unread_of_first(self, self._rows, lambda index: self._unread(_first_of(self._rows[index])))

    def __len__(self) -> int:
        return len(self._groups)

    def facts(self) -> Facts:
        """Returns what its rows have."""
        return Facts(True, self.fields, self.advantage == "teacher", {"": self.content_hash})

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns ``sequences`` of the answers of a group, with columns; a SampleError names the row.

        Beside them are the numbers of their ``answers``, which parts of one have in common, and the names of their ``rows``.
        """
        rows, answers, row_of = self._groups[index], list[Answer](), list[int]()
        for row in rows:
            with self._rows.naming(row):
                of_answers = rows_of_answers(self._rows[row])
            for number, of_answer in enumerate(of_answers):
                with self._rows.naming(row, f"answer {number}: " if len(of_answers) > 1 else ""):
                    keys = read_rollout(of_answer)
                    self._check_like_first(keys)
                    answer = answer_of(keys, self._tokenizer, self._images, self._truncates)
                    unread = self._unread(keys)
                    judge_unread(self, f"{self._rows.path}", unread, answer.lengths, "logprobs" not in keys.used)
                answers.append(answer)
                row_of.append(row)
        # What the group lacks as a whole is an error of its first row.
        with self._rows.naming(rows[0]):
            self._check_one_prompt(answers, row_of)
            made = [*self._sequences_of(answers)]
        return {
            "sequences": [sequence for _, _, sequence in made],
            "answers": [answer for answer, _, _ in made],
            "rows": [self._rows.name_of(row_of[place]) for _, place, _ in made],
        }

    def check_rows(self) -> None:
        """Raises SampleError for the first row that is no JSON object, such as the last one of a file that is half written."""
        for index in range(len(self._rows)):
            with self._rows.naming(index):
                self._rows[index]

    def _sequences_of(self, answers: Sequence[Answer]) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yields the answers that have a trained token, with their columns, behind their numbers and places in ``answers``."""
        # Parts of one rollout are one answer: one reward, one share of a mean over answers.
        parts: dict[Any, dict[int, Answer]] = {}
        for index, answer in enumerate(answers):
            parts.setdefault(index if answer.rollout is None else ("rollout", answer.rollout), {})[index] = answer
        if self._group_size not in (None, len(parts)):
            raise SampleError(f"the group is not whole: {len(parts)} answers, dataset.group_size={self._group_size}")
        rewards = np.array([_reward_of([*of_one.values()]) for of_one in parts.values()])
        advantages, has_rewards = self._advantages_of(rewards), not np.isnan(rewards).any()
        # Weights beside tokens sum to 1 for an answer, and to 1 for a group.
        sizes = np.array([sum(part.num_trained for part in of_one.values()) for of_one in parts.values()])
        num_of_group, is_masked = max(int(sizes.sum()), 1), sizes == 0
        is_equal = has_rewards and len(rewards) > 1 and not mean(rewards).any()
        # Rewards of answers without a trained token count in the mean reward, beside the tokens of the others.
        of_masked = rewards[is_masked].sum() / num_of_group
        if is_masked.all() and len(answers[0].tokens) > 1:
            beside = {"masked": float(len(rewards)), **({"rewards": rewards.sum()} if has_rewards else {})}
            yield 0, 0, _standing_for(answers[0].keys, {**dict.fromkeys(_WEIGHTLESS, 0.0), **beside})
        of_answers = zip(parts.values(), rewards, advantages, sizes, strict=True)
        for number, (of_one, reward, advantage, num_of_answer) in enumerate(of_answers):
            for place, part in ((place, part) for place, part in of_one.items() if part.num_trained):
                beside = {
                    "answers": 1 / num_of_answer,
                    "groups": 1 / num_of_group,
                    **({"masked": is_masked.sum() / num_of_group} if is_masked.any() else {}),
                    **({"rewards": reward / num_of_answer + of_masked} if has_rewards else {}),
                    "equal_groups": is_equal / num_of_group,
                    "advantages": advantage,
                    **({"teacher": 1.0} if self.advantage == "teacher" else {}),
                }
                columns = {column: part.beside[key] for key, column in _COLUMNS.items() if key in part.beside}
                if self.advantage == "given":
                    columns["advantages"] = part.beside["advantage"]
                labels = np.where(part.mask, part.tokens, IGNORE_INDEX)
                images = {} if part.images is None else {"image_inputs": part.images}
                yield number, place, {"tokens": part.tokens, "labels": labels, **images, **beside, **columns}

    def _advantages_of(self, rewards: np.ndarray) -> np.ndarray:
        """Returns the advantages [m] of answers with rewards [m], NaN where the file has none; 0 if they are by token."""
        if (np.abs(rewards) > _LARGEST).any():
            text = f"reward={rewards[np.abs(rewards).argmax()]:g}: its square is no number in fp32"
            raise SampleError(f"{text}; scale rewards to at most {_LARGEST:.0e}")
        if self.advantage not in OF_REWARDS:
            return np.zeros(len(rewards))
        if np.isnan(rewards).any():
            raise SampleError(
                f"it has no reward, which dataset.advantage={self.advantage} needs; write it, or set given"
            )
        if len(rewards) < 2:
            text = f"a group of one answer has nothing to compare it with (dataset.advantage={self.advantage})"
            raise SampleError(f"{text}; write the same group for answers to one prompt, or set given")
        return OF_REWARDS[self.advantage](rewards)

    def _check_like_first(self, keys: Rollout) -> None:
        """Raises SampleError unless a row has what the loss takes, and as the first row has it."""
        for field in FIELDS:
            if (field in keys.used) != (field in self.fields):
                one, other = ("it has no", "has") if field in self.fields else ("it has", "has none")
                remedy = "score all answers, or remove those without" if field == "reward" else "write it in all rows"
                raise SampleError(f"{one} {field}, and the first row {other}; {remedy}, or write it in none")
        needed = {"given": "advantage", "teacher": "logprobs"}.get(self.advantage)
        if needed and needed not in keys.used:
            raise SampleError(f"it has no {needed}, which dataset.advantage={self.advantage} needs; write it")

    def _check_one_prompt(self, answers: Sequence[Answer], row_of: Sequence[int]) -> None:
        """Raises SampleError unless the answers, of rows ``row_of``, have one prompt; a part of a rollout may have another."""
        parts: dict[Any, list[int]] = {}
        for index, answer in enumerate(answers):
            parts.setdefault(index if answer.rollout is None else ("rollout", answer.rollout), []).append(index)
        first, *others = parts.values()
        for other in others:
            if not any(_have_one_prompt(answers[one], answers[two]) for one in first for two in other):
                text = f"its group has answers to different prompts (that of {self._rows.name_of(row_of[other[0]])} is another)"
                raise SampleError(f"{text}; write another {'/'.join(_NAMES)} for each prompt")

    def _unread(self, keys: Rollout) -> dict[str, Any]:
        """Returns what is not read of a row, by its key."""
        is_read = "advantage" not in keys.used or self.advantage == "given"
        return keys.others | (
            {} if is_read else {f"{keys.used['advantage']} (dataset.advantage={self.advantage})": None}
        )


_NAMES = ("group", "step")


def _have_one_prompt(one: Answer, other: Answer) -> bool:
    """Returns True if two answers have equal tokens and images before them, as far as both rows tell which these are."""
    num = min(one.num_prompt, other.num_prompt)
    is_known = one.knows_prompt and other.knows_prompt
    # The images of an answer have one number, so that prompts are compared by it if there are none behind them.
    has_further = any(each.num_to_last_image > each.num_prompt for each in (one, other))
    first, second = ((each.tokens if has_further else each.keys)[:num] for each in (one, other))
    return (one.num_prompt == other.num_prompt or not is_known) and np.array_equal(first, second)


def _first_of(row: Mapping[str, Any]) -> Rollout:
    return read_rollout(rows_of_answers(row)[0])


def fields_of_first(rows: PathRows) -> frozenset[str]:
    """Returns those of :data:`FIELDS` that the first row has that can be read."""
    for index in range(len(rows)):
        with suppress(Exception):  # any: raised again with the sample
            return frozenset(FIELDS) & _first_of(rows[index]).used.keys()
    return frozenset()


def check_fields(declared: Iterable[str], found: Iterable[str], path: Any) -> None:
    """Raises ValueError for the first field that ``path`` has less or more than ``declared``, or that is none."""
    if unknown := {*declared} - {*FIELDS}:
        raise ValueError(f"dataset.fields={[*declared]}: {min(unknown)} is none of {', '.join(FIELDS)}; take it out")
    for field in FIELDS:
        if (field in found) != (field in declared):
            has, instead = ("no ", "write them") if field in declared else ("", "leave them out")
            taken = ", ".join(each for each in FIELDS if each in declared) or "none"
            text = f"it has {has}{field}; {instead}, because all rows of the training have {taken}"
            raise ValueError(f"dataset.path={path}: {text} (dataset.fields, or what its first file has)")


def check_advantage(advantage: str) -> None:
    """Raises ValueError unless ``advantage`` is one of those that are computed or read."""
    if advantage not in ADVANTAGES:
        raise ValueError(f"dataset.advantage={advantage}: set it to one of {', '.join(ADVANTAGES)}")


def _groups_of(rows: PathRows) -> Iterator[Sequence[int]]:
    """Yields the rows of each group, in the order of their first ones. Numbers of groups begin anew in each file.

    Reads each row once, unless the first one is a group of its own, as then are all others.
    """
    groups: dict[Any, list[int]] = {}
    names = [[name for name, field in Rollout.names().items() if field == key] for key in ("step", "group", "rollout")]
    prompts = [name for name, field in Rollout.names().items() if field in ("prompt", "prompt_ids")]
    last_prompt, first = list[Any](), -1  # of the row before, if its group has no name, and the group's first row
    for index in range(len(rows)):
        try:
            row: Mapping[str, Any] = rows[index]
            if index == 0 and is_group(row):
                yield from ([each] for each in range(len(rows)))
                return
            step, group, rollout = (
                next((row[name] for name in each if row.get(name) is not None), None) for each in names
            )
            prompt = [row.get(name) for name in (*prompts, "images", "image")]
        except Exception:  # any: raised again with the sample
            groups[("row", index)] = [index]
            continue
        if group is not None or rollout is not None:
            name = json.dumps(["rollout", rollout]) if group is None else _name_of(group)
            key: Any = ("group", rows.file_of(index), step, name)
            last_prompt = []
        else:  # neighbors with one prompt are a group
            first = first if any(map(row.get, prompts)) and prompt == last_prompt else index
            key, last_prompt = ("row", first), prompt
        groups.setdefault(key, []).append(index)
    yield from groups.values()


def _name_of(group: Any) -> str:
    """Returns the name of a group: 1, 1.0 and "1" are one."""
    is_whole = isinstance(group, float) and group.is_integer()
    return json.dumps(int(group)) if is_whole else group if isinstance(group, str) else json.dumps(group)


def _reward_of(parts: Sequence[Answer]) -> float:
    """Returns the reward of an answer, which all of its parts must have; NaN without one."""
    rewards = {part.reward for part in parts}
    if len(rewards) > 1:
        raise SampleError(
            f"parts of rollout={parts[0].rollout} have the rewards {sorted(map(str, rewards))}; write one"
        )
    (reward,) = rewards
    return np.nan if reward is None else reward


# ---- Groups without advantages, which cost no forward and stay in what the loss is divided by ------

_SUMMED = ("answers", "groups", "rewards", "equal_groups", "masked")
_WEIGHTLESS = ("advantages", "answers", "answer_tokens", "groups", "equal_groups", "ref_logprobs")
"""What is 0 beside the target of a group without a trained token, of which only the answers and their rewards count."""


def shorten_equal_group(sample: Any, _: str = "") -> Any:
    """Returns a sample; a group whose advantages are all 0 as one short sequence.

    Four answers of 100 tokens each with rewards 1, 1, 1, 1 have no gradient. One sequence of two tokens takes their place.
    Beside its only target, which has the advantage 0, are the 400 tokens, the 4 answers and the group, so that the other
    groups of the update step weigh what they would weigh beside all 400 tokens. Exact for losses whose terms all have the
    advantage as a factor: without a KL term.
    """
    sequences = sample.get("sequences", ()) if isinstance(sample, Mapping) else ()
    if not sequences or "measured" in sequences[0]:  # it is one already
        return sample
    if any(np.any(s.get(key, 0)) for s in sequences for key in ("advantages", "teacher")):
        return sample
    are_targets = [np.append(False, np.asarray(s["labels"])[1:] != IGNORE_INDEX) for s in sequences]
    beside = {"answer_tokens": float(sum(each.sum() for each in are_targets))}
    # A number of an answer is beside each of its targets.
    pairs = [*zip(sequences, are_targets, strict=True)]
    for name in sequences[0].keys() - {"tokens", "labels", "temperatures", "image_inputs"}:
        beside[name] = float(sum((of * np.asarray(s[name])).sum() for s, of in pairs)) if name in _SUMMED else 0.0
    tokens, images = np.asarray(sequences[0]["tokens"]), sequences[0].get("image_inputs")
    return {"sequences": [_standing_for(tokens if images is None else images.keys_of(tokens), beside)]}


def check_whole_answers(sample: Any, name: str) -> Any:
    """Returns a sample with this name. Raises UnusedError for an answer in several parts.

    ``kind: sequence`` has one ratio of an answer, which is known once all of its parts are; they may be in several
    microbatches, whose gradients are computed one after the other.
    """
    answers = sample.get("answers", []) if isinstance(sample, Mapping) else []
    for number in answers:
        if (num_parts := answers.count(number)) > 1:
            text = f"its answer has {num_parts} parts, and loss.kind=sequence needs all of them before a gradient"
            raise UnusedError(f"{name}: {sample['rows'][answers.index(number)]}: {text}; set loss.kind=clipped")
    return sample


def _standing_for(keys: np.ndarray, beside: Mapping[str, float]) -> dict[str, Any]:
    """Returns a sequence of the first two tokens of texts, whose only target has numbers of a whole group, and is not measured.

    ``keys`` [t] are tokens, below 0 where they are of images.
    """
    tokens = keys[keys >= 0]
    return {"tokens": tokens[:2], "labels": [IGNORE_INDEX, tokens[1]], "measured": 0.0, **beside}
