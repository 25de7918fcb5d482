"""Decoding with a model in training, sharded or not: the next token of all rows at once.

Example: prompts of 3 and 5 tokens. The first forward computes both, the shorter one behind 2 tokens of padding, and the logits
of their last positions choose the next tokens. The second one computes these two alone, at positions 3 and 5, each behind the
keys and values of its own row. Models without caches of keys and values compute rows of 4 and 6 tokens instead.

Ranks decode in lockstep: each runs as many forwards as the one whose answers are longest, because FSDP2 gathers weights in
each of them.

Shapes: b rows, s positions, v vocabulary.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from recipe_utils.model_kinds import text_decoder
from recipe_utils.models.attention.document_mask import longest_document
from recipe_utils.models.attention.packed_attention import other_attention, self_attentions
from recipe_utils.models.transformers.interface import DecoderOfTransformers
from recipe_utils.text.images.sample import ImageInputs
from recipe_utils.text.limits import ModelLimits, RowBounds
from recipe_utils.text.reader import TextReader
from recipe_utils.text.row_tensors import padded
from recipe_utils.text.samples import FIRST, TextSample
from recipe_utils.torchtune_names import IGNORE_INDEX

NextLogits = Callable[[Tensor, Tensor], Tensor]
"""Maps tokens [b, s] and the lengths of their rows [b] to logits of the next tokens [b, v]."""


class Decoded(NamedTuple):
    """Answer to a prompt."""

    tokens: list[int]
    """Tokens, with the end token that was chosen, if there was one."""
    log_probs: list[float]
    """Log-probability of each, of logits divided by the temperature."""


class Draws(NamedTuple):
    """Draws of tokens by their probability."""

    temperature: float
    """Divides the logits."""
    uniform: Tensor
    """Numbers in [0, 1) for each row and new token, [b, n] in fp64."""


@torch.no_grad()
def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: Collection[int],
    device: torch.device,
    draws: Draws | None = None,
    same_prompts: dist.ProcessGroup | None = None,
    max_length: int | None = None,
    images: Sequence[ImageInputs] = (),
) -> list[Decoded]:
    """Decodes answers to all prompts at once, greedily or as drawn. Draws no random numbers itself.

    All ranks call it together with ``max_new_tokens`` of one value, and prompts of their own. The model has no stages;
    its parameters may be offloaded. It computes without dropout. An answer ends after ``max_new_tokens``, with a token
    of ``ends``, or at the model's ``max_seq_len``, or ``max_length`` if that is less [tokens, with the prompt].

    ``same_prompts`` are ranks with equal prompts, which get the tokens of the first of them; None for all ranks.
    ``images`` are the inputs beside each prompt of a model of images; all tokens are then computed again for each new one.
    """
    # A rank without prompts computes a dummy row, whose answer is complete from the start.
    given = [*prompts] or [[0]]
    longest = min(max(map(len, given)) + max_new_tokens, longest_document(model), max_length or sys.maxsize)
    tokens = torch.zeros((len(given), longest), dtype=torch.long, device=device)
    for row, prompt in zip(tokens, given, strict=True):
        row[: len(prompt)] = torch.tensor(prompt[:longest], device=device)
    starts = [min(len(prompt), longest) for prompt in given]
    lengths = torch.tensor(starts, device=device)
    index = torch.arange(len(given), device=device)
    log_probs = torch.zeros((len(given), max_new_tokens), dtype=torch.float64, device=device)
    end_tokens = torch.tensor([*ends], dtype=torch.long, device=device)

    trains = model.training
    model.eval()
    try:
        with _next_logits(model, max(starts) + max_new_tokens, images) as next_logits:
            is_open = (lengths < longest) & bool(prompts)
            for step in range(max_new_tokens):
                if not _on_any_rank(is_open.any()):
                    break
                chosen, log_probs[:, step] = _choose(next_logits(tokens, lengths).double(), draws, step)
                if dist.is_initialized() and dist.get_world_size(same_prompts) > 1:
                    dist.broadcast(chosen, group=same_prompts, group_src=0)  # ranks may differ in a last digit
                tokens[index[is_open], lengths[is_open]] = chosen[is_open]
                lengths += is_open
                is_open &= ~torch.isin(chosen, end_tokens) & (lengths < longest)
    finally:
        model.train(trains)
    rows = zip(tokens.tolist(), starts, lengths.tolist(), log_probs.tolist(), strict=True)
    return [Decoded(row[start:end], found[: end - start]) for row, start, end, found in rows][: len(prompts)]


def _choose(logits: Tensor, draws: Draws | None, step: int) -> tuple[Tensor, Tensor]:
    """Returns the next tokens [b] of logits [b, v], and their log-probabilities [b]."""
    log_probs = torch.log_softmax(logits if draws is None else logits / draws.temperature, dim=-1)
    if draws is None:
        chosen = logits.argmax(-1)
    else:
        # The first token at which the sum of probabilities exceeds the number: one number per token of an answer.
        sums = log_probs.exp().cumsum(-1)
        targets = draws.uniform[:, step, None] * sums[:, -1:]
        chosen = torch.searchsorted(sums, targets, right=True).squeeze(1).clamp(max=logits.size(-1) - 1)
    return chosen, log_probs.gather(1, chosen[:, None]).squeeze(1)


def _on_any_rank(flag: Tensor) -> bool:
    """Returns True on all ranks if the flag [] is set on any of them."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        flag = flag.to(torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


# ---- Forwards -----------------------------------------------------------------------------------


@contextmanager
def _next_logits(model: nn.Module, num_keys: int, images: Sequence[ImageInputs]) -> Iterator[NextLogits]:
    """Yields the function that computes logits of the next tokens, with caches where the decoder has them."""
    last: list[Tensor] = []  # place of each row's last token in the forward [b], by default the last one

    def last_only(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
        if not last:
            return hidden[:, -1:]
        index = torch.arange(len(hidden), device=hidden.device)
        return hidden[index, last.pop()].unsqueeze(1)  # else logits would be [b, s, v]

    hook = text_decoder(model).norm.register_forward_hook(last_only)
    attentions = self_attentions(model) if text_decoder(model) is model else []
    try:
        if images:
            yield lambda tokens, lengths: _recomputed_with_images(model, last, tokens, lengths, images)
        elif isinstance(model, DecoderOfTransformers) and model.check.spans_ranks:
            # All but causal attention is computed token by token.
            yield _Cached(*_of_transformers(model))
        elif attentions and other_attention(model) is None and len(attentions) == len(text_decoder(model).layers):
            with _of_torchtune(model, attentions, num_keys) as forward_and_expand:
                yield _Cached(*forward_and_expand)
        else:
            yield lambda tokens, lengths: _recomputed(model, last, tokens, lengths)
    finally:
        hook.remove()


def _recomputed(model: nn.Module, last: list[Tensor], tokens: Tensor, lengths: Tensor) -> Tensor:
    """Computes all tokens so far."""
    last.append(lengths - 1)
    return _logits(model(tokens[:, : int(lengths.max())]))


def _recomputed_with_images(
    model: Any, last: list[Tensor], tokens: Tensor, lengths: Tensor, images: Sequence[ImageInputs]
) -> Tensor:
    """Computes all tokens so far, behind the images of their prompts."""
    last.append(lengths - 1)
    samples = []
    for row, length, beside in zip(tokens.cpu().numpy(), lengths.tolist(), images, strict=True):
        no_targets = np.full(length, IGNORE_INDEX)
        samples.append(TextSample("prompt", FIRST, row[:length], no_targets, [length], images=beside.continued(length)))
    reader = TextReader(bounds=RowBounds(limits=ModelLimits(joins=model.check.joins)))
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(tokens.device), padded(samples, reader).inputs)
    return _logits(model(**inputs))


class _Cached:
    """Computes each prompt once, then each new token behind the keys and values of its row.

    Args:
        forward: computes new tokens [b, s] at their positions [b, s] behind the visible keys [b, m], of which the last s
            are their own. Others are padding, before the prompts: a window reaches as far as without it.
        expand: makes row i, of b, of the caches a copy of row ``of_row[i]``.
    """

    def __init__(self, forward: Callable[..., Any], expand: Callable[[Tensor], None]) -> None:
        self._forward, self._expand = forward, expand
        self._visible: Tensor | None = None

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Returns logits of the next tokens [b, v]. Rows that have ended compute their last token again."""
        if self._visible is None:
            # Answers to one prompt have equal rows.
            width = int(lengths.max())
            rows = torch.cat([lengths[:, None], tokens[:, :width]], dim=1)
            prompts, of_row = torch.unique(rows, dim=0, return_inverse=True)
            positions = torch.arange(width, device=tokens.device) - (width - prompts[:, :1])
            visible, positions = positions >= 0, positions.clamp(min=0)
            logits = _logits(self._forward(prompts[:, 1:].gather(1, positions), visible, positions))
            self._expand(of_row)
            self._visible = visible[of_row]
            return logits[of_row]
        new = lengths[:, None] - 1
        self._visible = torch.cat([self._visible, torch.ones_like(new, dtype=torch.bool)], dim=1)
        return _logits(self._forward(tokens.gather(1, new), self._visible, new))


def _of_transformers(model: nn.Module) -> tuple[Callable[..., Any], Callable[[Tensor], None]]:
    """Returns the forward of a decoder of transformers with a cache of its own, and what expands that."""
    from transformers import DynamicCache

    cache = DynamicCache()

    def forward(tokens: Tensor, visible: Tensor, positions: Tensor) -> Any:
        return model(tokens, mask=visible, input_pos=positions, cache=cache)

    return forward, cache.batch_select_indices


class _Cache:
    """Keys and values of one layer, called as torchtune's ``KVCache``; its dtype and heads are those of the forward."""

    def __init__(self, num_keys: int) -> None:
        self._num_keys, self.size = num_keys, 0

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values [b, g, s, d]. Returns all so far."""
        if not self.size:
            shape = (*k.shape[:2], self._num_keys, k.size(3))
            self._k, self._v = k.new_empty(shape), v.new_empty(shape)
        new, self.size = slice(self.size, self.size + k.size(2)), self.size + k.size(2)
        self._k[:, :, new], self._v[:, :, new] = k, v
        return self._k[:, :, : self.size], self._v[:, :, : self.size]

    def expand(self, of_row: Tensor) -> None:
        """Makes row i, of b, a copy of row ``of_row[i]`` [b]."""
        self._k, self._v = self._k[of_row], self._v[of_row]


@contextmanager
def _of_torchtune(
    model: nn.Module, attentions: Sequence[Any], num_keys: int
) -> Iterator[tuple[Callable[..., Any], Callable[[Tensor], None]]]:
    """Yields the same for a decoder of torchtune, whose self-attentions have caches in the block.

    Layers run uncompiled: they would be compiled for caches, too.
    """
    caches = [_Cache(num_keys) for _ in attentions]

    def forward(tokens: Tensor, visible: Tensor, positions: Tensor) -> Any:
        s, m = tokens.size(1), visible.size(1)
        is_before = torch.ones(s, m, dtype=torch.bool, device=tokens.device).tril(m - s)
        own = is_before.triu(m - s)  # also of padding, which would be NaN
        return model(tokens, mask=(visible[:, None] & is_before) | own, input_pos=positions)

    def expand(of_row: Tensor) -> None:
        for cache in caches:
            cache.expand(of_row)

    for attention, cache in zip(attentions, caches, strict=True):
        attention.kv_cache, attention.cache_enabled = cache, True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield forward, expand
    finally:
        for attention in attentions:
            attention.kv_cache, attention.cache_enabled = None, False


def _logits(output: Any) -> Tensor:
    """Returns logits [b, v] of a model's output for one position, which may be in chunks."""
    logits = torch.cat(output, dim=1) if isinstance(output, list) else output
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return logits[:, -1]
