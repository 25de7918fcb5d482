"""Bare training loops as the upper bound of throughput.

Samples are tokenized before the first step and concatenated into rows without padding. Samples
attend only to themselves; only target positions are projected onto the vocabulary. There are no
ranks, compilation or activation checkpointing. The loops do not use losses and plans of the
update-step recipes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torchtune import config as torchtune_config
from torchtune import training
from torchtune.modules import MultiHeadAttention, TransformerDecoder
from torchtune.utils import get_device

from recipe_utils.benchmark.baselines.start import load_start, make_lr_scheduler
from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.token_audit import IGNORE_INDEX, samples_in_order
from recipe_utils.data.loader.samples import Sample


def train_text(config: DictConfig) -> None:
    """Fine-tunes with one row per update step, or rows of at most ``max_tokens_per_row`` tokens."""
    bare = BareModel(config)

    def losses(step: Sequence[Sample]) -> Iterator[Tensor]:
        rows = [row_of(row) for row in _rows(step, config.get("max_tokens_per_row"))]
        num_targets = sum(len(row.labels) for row in rows)
        for row in rows:
            yield -bare.log_probs(row).sum() / num_targets

    _train(config, bare.model, losses)


def train_dpo(config: DictConfig) -> None:
    """Tunes with a live reference; a row has both sides of ``pairs_per_row`` (batch_size) pairs."""
    of_reference = {**config, "checkpointer": config.get("ref_checkpointer") or config.checkpointer}
    policy, reference = BareModel(config), BareModel(OmegaConf.create(of_reference))
    reference.model.requires_grad_(False)
    loss_fn = torchtune_config.instantiate(config.loss)

    def losses(step: Sequence[Sample]) -> Iterator[Tensor]:
        for pairs in _parts(step, config.get("pairs_per_row") or config.batch_size):
            sides = [
                {"tokens": pair[f"{side}_input_ids"], "labels": pair[f"{side}_labels"]}
                for side in ("chosen", "rejected")
                for pair in pairs
            ]
            row = row_of(sides)
            num_targets = [sum(x != IGNORE_INDEX for x in each["labels"][1:]) for each in sides]
            with torch.no_grad():
                reference_sums = _sums(reference.log_probs(row), num_targets)
            policy_sums = _sums(policy.log_probs(row), num_targets)
            per_pair, *_ = loss_fn(*policy_sums, *reference_sums)
            yield per_pair.sum() / len(step)

    _train(config, policy.model, losses)


def _train(
    config: DictConfig, model: nn.Module, losses: Callable[[Sequence[Sample]], Iterator[Tensor]]
) -> None:
    """Trains a model; ``losses`` yields the terms of an update step's loss."""
    optimizer = torchtune_config.instantiate(config.optimizer, model.parameters())
    lr_scheduler = make_lr_scheduler(config, optimizer)
    samples = samples_in_order(config, torchtune_config.instantiate(config.tokenizer), num_ranks=1)
    logger = LossLogger()
    per_step = config.batch_size * config.gradient_accumulation_steps
    for number, step in enumerate(_parts(samples, per_step), start=1):
        loss_of_step = torch.zeros((), device=get_device(config.device))
        for loss in losses(step):
            loss.backward()
            loss_of_step += loss.detach()
        if config.get("clip_grad_norm") is not None:
            nn.utils.clip_grad_norm_(model.parameters(), float(config.clip_grad_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if lr_scheduler is not None:
            lr_scheduler.step()
        logger.log("loss", loss_of_step.item(), number)


class Row(NamedTuple):
    """Concatenated samples of t tokens with n targets."""

    lengths: list[int]  # of each sample
    tokens: Tensor  # [1, t]
    positions: Tensor  # [1, t], from 0 in each sample
    target_positions: Tensor  # [n], positions in the row whose next token is a target
    labels: Tensor  # [n]


def row_of(samples: Sequence[Sample]) -> Row:
    """Concatenates samples with ``tokens`` and ``labels``."""
    lengths = [len(sample["tokens"]) for sample in samples]
    positions = torch.cat([torch.arange(length) for length in lengths])
    next_labels = torch.tensor(
        [label for sample in samples for label in [*sample["labels"][1:], IGNORE_INDEX]]
    )
    target_positions = (next_labels != IGNORE_INDEX).nonzero().squeeze(1)
    tokens = torch.tensor([token for sample in samples for token in sample["tokens"]])
    labels = next_labels[target_positions]
    return Row(lengths, tokens[None], positions[None], target_positions, labels)


class BareModel:
    """``TransformerDecoder`` with attention within samples and logits of targets only."""

    def __init__(self, config: DictConfig) -> None:
        self._device = get_device(config.device)
        dtype = training.get_dtype(config.dtype, device=self._device)
        with training.set_default_dtype(dtype), self._device:
            self.model = torchtune_config.instantiate(config.model)
        if not isinstance(self.model, TransformerDecoder):
            name = type(self.model).__name__
            raise ValueError(f"model: {name} is not a torchtune TransformerDecoder")
        load_start(self.model, config)
        self._lengths: list[int] = []
        for module in self.model.modules():
            if isinstance(module, MultiHeadAttention):
                module._attention_call = self._attend_per_sample
        self.model.max_seq_len = 2**31  # a row may be longer than a sample; positions restart
        self.model.unembed = lambda hidden: hidden

    def log_probs(self, row: Row) -> Tensor:
        """Returns the log-probabilities of a row's targets, [n] in fp32 [nats]."""
        self._lengths = row.lengths
        tokens, positions, target_positions, labels = (each.to(self._device) for each in row[1:])
        hidden = self.model(tokens, input_pos=positions)[0]
        hidden = self.model.norm(hidden.index_select(0, target_positions))
        logits = self.model.output(hidden).float()
        return -F.cross_entropy(logits, labels, reduction="none")

    def _attend_per_sample(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        # The backward of each slice, unlike that of split, would allocate a row of zeros.
        split = [each.split(self._lengths, 2) for each in (q, k, v)]
        attended = [
            F.scaled_dot_product_attention(*part, is_causal=True)  # type: ignore[misc]
            for part in zip(*split, strict=True)
        ]
        return torch.cat(attended, dim=2)


def _sums(log_probs: Tensor, num_targets: Sequence[int]) -> Sequence[Tensor]:
    """Sums log-probabilities [n] of targets per chosen and rejected answer, [p] each."""
    return torch.stack([each.sum() for each in log_probs.split(list(num_targets))]).chunk(2)


def _rows(samples: Sequence[Sample], max_tokens: int | None) -> Iterator[list[Sample]]:
    """Cuts samples into rows of at most ``max_tokens`` tokens, or a single longer sample."""
    row: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        length = len(sample["tokens"])
        if row and max_tokens is not None and num_tokens + length > max_tokens:
            yield row
            row, num_tokens = [], 0
        row.append(sample)
        num_tokens += length
    yield row


def _parts(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    for start in range(0, len(samples), size):
        yield samples[start : start + size]
