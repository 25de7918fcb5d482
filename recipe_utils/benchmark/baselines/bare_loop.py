"""A bare training loop as the upper bound of throughput.

Samples are tokenized before the first step and concatenated into rows without padding. Samples
attend only to themselves; only target positions are projected onto the vocabulary. There are no
ranks, compilation or activation checkpointing. Losses and plans are not those of the recipes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torchtune import config as torchtune_config
from torchtune import training
from torchtune.modules import MultiHeadAttention, TransformerDecoder
from torchtune.utils import get_device

from recipe_utils.benchmark.baselines.start import load_start, make_lr_scheduler
from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.token_audit import IGNORE_INDEX, samples_in_order
from recipe_utils.update_steps.samples import Sample


def train_text(config: DictConfig) -> None:
    """Fine-tunes with one row per update step."""
    bare = BareModel(config)
    optimizer = torchtune_config.instantiate(config.optimizer, bare.model.parameters())
    lr_scheduler = make_lr_scheduler(config, optimizer)
    samples = samples_in_order(config, torchtune_config.instantiate(config.tokenizer), num_ranks=1)
    logger = LossLogger()
    per_step = config.batch_size * config.gradient_accumulation_steps
    for number, start in enumerate(range(0, len(samples), per_step), start=1):
        row = row_of(samples[start : start + per_step])
        loss = bare.loss(row) / len(row.labels)
        loss.backward()
        if config.get("clip_grad_norm") is not None:
            nn.utils.clip_grad_norm_(bare.model.parameters(), float(config.clip_grad_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if lr_scheduler is not None:
            lr_scheduler.step()
        logger.log("loss", loss.item(), number)


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
    next_labels = torch.tensor([label for sample in samples for label in [*sample["labels"][1:], IGNORE_INDEX]])
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

    def loss(self, row: Row) -> Tensor:
        """Returns the summed cross-entropy of a row's targets [nats], [] in fp32."""
        self._lengths = row.lengths
        tokens, positions, target_positions, labels = (each.to(self._device) for each in row[1:])
        hidden = self.model(tokens, input_pos=positions)[0]
        hidden = self.model.norm(hidden.index_select(0, target_positions))
        logits = self.model.output(hidden).float()
        return F.cross_entropy(logits, labels, reduction="sum")

    def _attend_per_sample(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        # The backward of each slice, unlike that of split, would allocate a row of zeros.
        split = [each.split(self._lengths, 2) for each in (q, k, v)]
        attended = [
            F.scaled_dot_product_attention(*part, is_causal=True)  # type: ignore[misc]
            for part in zip(*split, strict=True)
        ]
        return torch.cat(attended, dim=2)
