"""Answers to prompts: a part of a training, and texts of what a model in training decodes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchtune.data import Message

from recipe_utils.models.decoding import decode
from recipe_utils.training.parts.protocol import Part
from recipe_utils.training.run import Run
from recipe_utils.update_steps.step import UpdateStep


class Answers(Part):
    """Answers to ``sample_prompts``, logged and written to ``logs/samples.jsonl``."""

    def __init__(self, run: Run, model: nn.Module, tokenizer: Any) -> None:
        self._run, self._model, self._tokenizer = run, model, tokenizer

    def after(self, step: UpdateStep) -> dict[str, float]:
        """Writes the answers. Returns no metrics."""
        run, prompts = self._run, self._run.settings.sample_prompts or []
        max_new_tokens = run.settings.sample_max_new_tokens
        with run.parts.weights():
            answers = generate(self._model, self._tokenizer, prompts, max_new_tokens, run.ranks.device)
        run.log.write_answers(run.global_step, prompts, answers)
        return {}


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Mapping[str, str]],
    max_new_tokens: int,
    device: torch.device,
) -> list[str]:
    """Decodes greedily, all prompts at once. Returns the answers, equal on all ranks; see :func:`.decode`."""
    ends, images = end_tokens(tokenizer), []
    if any(isinstance(prompt, Mapping) for prompt in prompts):
        made = [tokenizer.prompt_beside_image(prompt) for prompt in prompts]
        rows, images = [each.tokens.tolist() for each in made], [each.images for each in made]
    else:
        rows = [tokens_of(tokenizer, prompt) for prompt in prompts if isinstance(prompt, str)]
    answers = decode(model, rows, max_new_tokens, ends, device, images=images)
    return [text_of(tokenizer, answer.tokens) for answer in answers]


def tokens_of(tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the tokens of a prompt, a text of the user or messages, up to the answer."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [Message(**turn) for turn in turns] + [Message(role="assistant", content="")]
    tokens: list[int] = tokenizer({"messages": messages}, inference=True)["tokens"]
    return tokens


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns the text of an answer, without the token that ended it."""
    ends = end_tokens(tokenizer)
    text: str = tokenizer.decode([token for token in tokens if token not in ends])
    return text


def end_tokens(tokenizer: Any) -> set[int]:
    """Returns the tokens that end an answer."""
    return set(getattr(tokenizer, "stop_tokens", [tokenizer.eos_id]))
