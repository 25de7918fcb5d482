"""Answers to prompts: a part of a training, and greedy decoding with a model in training, sharded or not."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtune.data import Message

from recipe_utils.model_kinds import text_decoder
from recipe_utils.models.attention.document_mask import longest_document
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


@torch.no_grad()
def generate(
    model: nn.Module, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int, device: torch.device
) -> list[str]:
    """Decodes greedily, all prompts at once. Returns the answers, equal on all ranks.

    Recomputes all tokens for each new one: no KV cache takes memory from training. Draws no random
    numbers. The model has no stages; its parameters may be offloaded. An answer ends after
    ``max_new_tokens`` or at the model's ``max_seq_len``.
    """
    rows = [_tokens_of(tokenizer, prompt) for prompt in prompts]
    ends = set(getattr(tokenizer, "stop_tokens", [tokenizer.eos_id]))
    decoder = text_decoder(model)
    longest = min(max(map(len, rows)) + max_new_tokens, longest_document(model))
    tokens = torch.full((len(rows), longest), tokenizer.pad_id, device=device)
    for row, given in zip(tokens, rows, strict=True):
        row[: len(given)] = torch.tensor(given[:longest], device=device)
    lengths = torch.tensor([min(len(given), longest) for given in rows], device=device)
    index = torch.arange(len(rows), device=device)

    def last_only(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
        return hidden[index, lengths - 1].unsqueeze(1)  # else logits would be [b, s, v]

    trains = model.training
    hook = decoder.norm.register_forward_hook(last_only)
    model.eval()
    try:
        is_open = lengths < longest
        for _ in range(max_new_tokens):
            if not is_open.any():
                break
            best = _logits(model(tokens)).argmax(-1)
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(best, src=0)  # ranks may differ in a last digit
            tokens[index[is_open], lengths[is_open]] = best[is_open]
            lengths += is_open
            is_end = torch.tensor([token in ends for token in best.tolist()], device=device)
            is_open &= ~is_end & (lengths < longest)
    finally:
        hook.remove()
        model.train(trains)
    answers = []
    for row, length, given in zip(tokens.tolist(), lengths.tolist(), rows, strict=True):
        answers.append(tokenizer.decode([t for t in row[len(given) : length] if t not in ends]))
    return answers


def _tokens_of(tokenizer: Any, prompt: str) -> list[int]:
    messages = [Message(role="user", content=prompt), Message(role="assistant", content="")]
    tokens: list[int] = tokenizer({"messages": messages}, inference=True)["tokens"]
    return tokens


def _logits(output: Any) -> Tensor:
    """Returns logits [b, v] of a model's output for one position, which may be in chunks."""
    logits = torch.cat(output, dim=1) if isinstance(output, list) else output
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return logits[:, -1].float()
