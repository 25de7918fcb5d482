"""Sampler of rollouts: the model under training answers prompts, and a function of the config rewards the answers.

Example: 2 prompts with ``group_size: 3`` on two ranks are 6 answers. Rank 0 decodes answers 0 and 2 of the first prompt and 1
of the second one, rank 1 the others. A token is drawn with a number that depends on the seed, the round, the prompt, the answer
and the token's place alone, so that any number of ranks samples the same answers. Rank 0 rewards all of them at once.
"""

import asyncio
import inspect
import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from recipe_utils.models.attention.document_mask import longest_document
from recipe_utils.models.decoding import Decoded, Draws, decode
from recipe_utils.models.runner import Runner
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.components import component_at
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.text.conversations.file_rows import FileRow, turns_in
from recipe_utils.text.conversations.messages import Chat, as_turns
from recipe_utils.text.conversations.paths import PathRows
from recipe_utils.text.images.sources import num_images_in
from recipe_utils.training.parts.answers import end_tokens, text_of, tokens_of
from recipe_utils.training.setup import Built
from recipe_utils.update_steps.permutation import epoch_permutation, seed_of
from recipe_utils.update_steps.samples import SampleError

Reward = Callable[..., Any]
Group = dict[str, Any]
"""Row of a file of rollouts: answers to one prompt with their rewards."""
_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state")
"""Arguments of a reward that are no columns, as in TRL."""
_NO_COLUMNS = ("prompt", "completion")


class ModelSampler:
    """Samples answers of the model under training, and rewards them.

    Args:
        prompts: file, or files, of rows with ``prompt``, a text of the user or messages. Other keys are for the reward.
        reward: path of a function, or coroutine, ``reward(prompts, completions, **columns)`` that returns a number for each
            completion, as TRL's: a completion is a text, or a list of one message where its prompt is messages. Further
            arguments are lists of the rows' values of a key, ``completion_ids`` (lists of tokens) and ``trainer_state`` (its
            ``global_step`` and ``epoch``). Completions with None are left out of their group; a group of which fewer than
            two have a number has equal rewards, and no gradient.
        group_size: number of answers to a prompt.
        temperature: divides the logits.
        max_new_tokens: maximum number of tokens of an answer, which is otherwise cut there.
        seed: seed of all draws, and of the order of the prompts.
        batch_size: number of answers that a rank decodes at once.

    Raises:
        ValueError: an argument is out of its bounds, the rows have no ``prompt``, there is no such function, or it needs
            an argument that there is not.
        OSError: ``prompts`` cannot be read.
    """

    key = "sampler"
    """Config key, for errors."""

    def __init__(
        self,
        prompts: str | Path | list[str | Path],
        reward: str,
        group_size: int = 8,
        temperature: float = 1.0,
        max_new_tokens: int = 64,
        seed: int = 0,
        batch_size: int = 128,
    ) -> None:
        least = {"group_size": group_size, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
        for name, number in least.items():
            if number < 1:
                raise ValueError(f"{name}={number}: set it to 1 or more")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature}: set it to a number above 0")
        paths = str(prompts) if isinstance(prompts, str | Path) else [*map(str, prompts)]
        self._rows, self._name = PathRows(paths), reward
        self._reward: Reward = component_at(reward)
        if not callable(self._reward):
            raise ValueError(f"reward={reward}: it is a {type(self._reward).__name__}, not a function")
        columns: dict[str, None] = {}
        for index in range(len(self._rows)):
            with self._rows.naming(index):
                _prompt_of(self._rows[index])
                columns |= dict.fromkeys(self._rows[index])
        self._takes = _arguments_of(self._reward, reward, [*_GIVEN, *(columns.keys() - {*_GIVEN, *_NO_COLUMNS})])
        self._group_size, self._temperature, self._seed = group_size, temperature, seed
        self._max_new_tokens, self._batch_size = max_new_tokens, batch_size

    def __len__(self) -> int:
        """Returns the number of prompts."""
        return len(self._rows)

    def sample(
        self,
        model: nn.Module,
        tokenizer: Any,
        ranks: Ranks,
        index: int,
        num_prompts: int,
        is_stopped: Callable[[], bool] = lambda: False,
        global_step: int = 0,
    ) -> list[Group]:
        """Returns a group for each of ``num_prompts`` prompts of a round, the same on all ranks, which call it together.

        Rounds, from index 0, take the prompts one after the other, in an order of each pass. ``is_stopped``, of which
        the ranks agree on the value, is called before each batch; after True there are no groups. Raises ConfigError
        for a prompt that leaves no room for an answer, and for errors of the reward.
        """
        # The prompts of the round, by their places in all rounds.
        passes = [divmod(place, len(self)) for place in range(index * num_prompts, (index + 1) * num_prompts)]
        orders = {epoch: epoch_permutation(len(self), epoch, True, self._seed) for epoch, _ in passes}
        rows = [self._rows[int(orders[epoch][place])] for epoch, place in passes]
        prompts = [tokens_of(tokenizer, _prompt_of(row)) for row in rows]
        longest = self._longest(model, tokenizer, rows, prompts)

        # Shares of ranks differ by one answer at most, and all ranks decode as many batches.
        answers = [*product(range(num_prompts), range(self._group_size))]
        share, most = answers[ranks.dp_rank :: ranks.dp_degree], -(-len(answers) // ranks.dp_degree)
        decoded = dict[tuple[int, int], Decoded]()
        for start in range(0, most, self._batch_size):
            if is_stopped():
                return []
            batch = share[start : start + self._batch_size]
            uniform = [self._uniform(index, *answer) for answer in batch or [(0, 0)]]
            found = decode(
                model,
                [prompts[prompt] for prompt, _ in batch],
                self._max_new_tokens,
                end_tokens(tokenizer),
                ranks.device,
                Draws(self._temperature, torch.stack(uniform).to(ranks.device)),
                ranks.mesh.get_group("tp"),
                longest,
            )
            decoded |= zip(batch, found, strict=True)

        # Tensor-parallel ranks have equal shares, up to a last digit of log-probabilities: those of the leaders count.
        for of_rank in gather_objects(decoded if ranks.is_dp_leader else {}, ranks.cpu_group):
            decoded |= of_rank
        groups = [[decoded[prompt, k] for k in range(self._group_size)] for prompt in range(num_prompts)]
        texts = [[text_of(tokenizer, answer.tokens) for answer in group] for group in groups]
        state = SimpleNamespace(global_step=global_step, epoch=float(index))
        ids = [answer.tokens for group in groups for answer in group]
        rewarded = self._rewards(rows, texts, ids, state) if ranks.is_zero else None
        rewards, problem = gather_objects(rewarded, ranks.cpu_group)[0]
        if problem is not None:
            raise ConfigError(Problem(f"{self.key}.reward", problem, self._name))
        made = []
        for place, (prompt, group, completions) in enumerate(zip(prompts, groups, texts, strict=True)):
            of_group = rewards[place * self._group_size : (place + 1) * self._group_size]
            scored = [k for k, reward in enumerate(of_group) if reward is not None]
            if len(scored) < min(2, self._group_size):  # nothing to compare
                scored, of_group = [*range(self._group_size)], [sum(of_group[k] for k in scored)] * self._group_size
            made.append(
                {
                    "prompt_ids": prompt,
                    "completion_ids": [group[k].tokens for k in scored],
                    "logprobs": [group[k].log_probs for k in scored],
                    "rewards": [of_group[k] for k in scored],
                    "temperature": self._temperature,
                    "completions": [completions[k] for k in scored],
                }
            )
        return made

    def _longest(
        self, model: nn.Module, tokenizer: Any, rows: Sequence[Mapping[str, Any]], prompts: Sequence[Sequence[int]]
    ) -> int:
        """Returns the greatest length of a prompt and its answer. Raises ConfigError for a prompt without room for one."""
        limits = longest_document(model), getattr(tokenizer, "max_seq_len", None)
        longest = min(filter(None, limits))
        for row, prompt in zip(rows, prompts, strict=True):
            if len(prompt) >= longest:  # the tokenizer may have cut it
                text = f"a prompt leaves no room for an answer within {longest} tokens: {str(row['prompt'])[:60]!r}"
                text += "; remove it, or set tokenizer.max_seq_len higher"
                raise ConfigError(Problem(f"{self.key}.prompts", text))
        return longest

    def _uniform(self, index: int, prompt: int, answer: int) -> torch.Tensor:
        """Returns a number in [0, 1) for each token of an answer, fp64."""
        generator = torch.Generator().manual_seed(seed_of(self._seed, index, prompt, answer))
        return torch.rand(self._max_new_tokens, dtype=torch.float64, generator=generator)

    def _rewards(
        self,
        rows: Sequence[Mapping[str, Any]],
        texts: Sequence[Sequence[str]],
        completion_ids: Sequence[Sequence[int]],
        trainer_state: Any,
    ) -> tuple[list[float | None], str | None]:
        """Returns the rewards of all completions, or the problem with them: the other ranks wait for either."""
        of_answers = [row for row in rows for _ in range(self._group_size)]
        prompts, completions = [row["prompt"] for row in of_answers], list[Any]()
        for prompt, text in zip(prompts, (text for of_prompt in texts for text in of_prompt), strict=True):
            completions.append(text if isinstance(prompt, str) else [{"role": "assistant", "content": text}])
        given = dict(zip(_GIVEN, (prompts, completions, completion_ids, trainer_state), strict=True))
        try:
            arguments = {name: given.get(name, [row.get(name) for row in of_answers]) for name in self._takes}
            found = self._reward(**arguments)
            found = asyncio.run(found) if inspect.iscoroutine(found) else found
            rewards = [None if reward is None else float(reward) for reward in found]
        except Exception as error:  # any: it is the user's
            place = traceback.extract_tb(error.__traceback__)[-1]
            return [], f"{type(error).__name__}: {error} (line {place.lineno} of {place.filename})"
        if len(rewards) != len(completions):
            return [], f"it returned {len(rewards)} numbers for {len(completions)} completions"
        if bad := [place for place, reward in enumerate(rewards) if reward is not None and not math.isfinite(reward)]:
            text = [text for of_prompt in texts for text in of_prompt][bad[0]]
            return [], f"it returned {rewards[bad[0]]} for the completion {text[:60]!r}"
        return rewards, None


def _prompt_of(row: Mapping[str, Any]) -> Chat:
    prompt = FileRow.of({"prompt": turns_in(row.get("prompt"))}).prompt
    if prompt is None:
        raise SampleError("it has no prompt; write a text of the user, or messages")
    chat = as_turns(prompt, "user").chat
    if num_images_in(chat) or row.get("images") or row.get("image"):
        raise SampleError("it has an image, and a sampler decodes texts alone; sample with an engine, or remove it")
    return chat


def _arguments_of(reward: Reward, path: str, names: Sequence[str]) -> list[str]:
    """Returns which arguments a function takes of those that there are. Raises ValueError if it needs another."""
    try:
        parameters = inspect.signature(reward).parameters.values()
    except ValueError:  # of a builtin
        return [*names]
    by_name = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    needed = [each.name for each in by_name if each.default is each.empty]
    unnamed = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]
    if unknown := [*unnamed, *(name for name in needed if name not in names)]:
        text = f"it needs {', '.join(unknown)}; write it as a key of the prompts' rows, or take the argument out"
        raise ValueError(f"reward={path}: {text} (there are {', '.join(names)})")
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return [name for name in names if takes_all or name in {each.name for each in by_name}]


def sampled_reward(sampler: ModelSampler | None, built: Built, model: Runner) -> dict[str, Tensor | float]:
    """Returns ``val_reward``: the mean reward of answers to all prompts of ``sampler_val``; nothing without one.

    Draws are the same each time.
    """
    if sampler is None:
        return {}
    sampler.key = "sampler_val"
    groups = sampler.sample(model.module, built.tokenizer, built.run.ranks, 0, len(sampler))
    return {"val_reward": mean_reward(groups)}


def mean_reward(groups: Sequence[Group]) -> float:
    """Returns the mean reward of all answers."""
    rewards = [reward for group in groups for reward in group["rewards"]]
    return sum(rewards) / len(rewards)


def file_of(groups: Sequence[Group], policy_version: int) -> str:
    """Returns groups as JSON Lines."""
    return "".join(json.dumps({**group, "policy_version": policy_version}) + "\n" for group in groups)
