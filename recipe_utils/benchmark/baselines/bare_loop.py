"""The idea of the project in one file, and the upper bound of throughput in the benchmark.

An update step is one optimizer step. Everything that it needs is decided before its first forward: which samples,
how they form rows, and how many target tokens they have. Then its loss is the sum over all target tokens times one
scale, and samples may form rows in any way. Example: four samples, of which a prompt is not trained on.

    sample   tokens      targets
    0        p p a a a   3          a target is a token of the answer: it is predicted from the position before it
    1        p a a       2
    2        p p a ...   7          9 tokens
    3        p a         1

*Padded*, two samples per microbatch, they are 2 x 5 + 2 x 9 = 28 positions. Microbatches have 5 and 8 targets, so
the mean of their mean losses gives a token of the first the weight 1/10 and one of the second 1/16. *Here* each has
the weight 1/13: targets are counted first, losses are summed, and the sum is multiplied by 1/13.

*Packed*, the samples are one row of 19 positions without padding:

    tokens            p p a a a p a a p p a a a a a a a p a
    positions         0 1 2 3 4 0 1 2 0 1 2 3 4 5 6 7 8 0 1     restart, so that RoPE is that of each sample
    target positions    1 2 3   5 6     9 ... 15          17    whose next token is a target: 13

Attention is computed within each sample, so every loss is that of the sample alone. Only hidden states at the 13
target positions are projected onto the vocabulary. The gradient equals that of one large padded batch.

The recipes add: ranks, a budget of tokens per row (:mod:`recipe_utils.plans.packed`), a thread that prepares update
steps (:mod:`recipe_utils.update_steps.loader`), checkpoints, compiled layers and recomputation, other models.
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

from recipe_utils.benchmark.baselines.start import load_start
from recipe_utils.benchmark.interleave import LossLogger
from recipe_utils.benchmark.token_audit import samples_in_order
from recipe_utils.optim.optimizer import make_schedule
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.samples import Sample


def train_text(config: DictConfig) -> None:
    """Fine-tunes with one row per update step."""
    bare = BareModel(config)
    optimizer = torchtune_config.instantiate(config.optimizer, bare.model.parameters())
    lr_scheduler = make_schedule(config.get("lr_scheduler"), optimizer, config.max_steps_per_epoch)
    samples = samples_in_order(config, torchtune_config.instantiate(config.tokenizer), num_ranks=1)
    logger = LossLogger()
    per_step = config.batch_size * config.gradient_accumulation_steps
    for number, start in enumerate(range(0, len(samples), per_step), start=1):
        # All samples of the update step, before its first forward. More rows would give the same gradient.
        rows = [pack(samples[start : start + per_step])]
        scale = 1 / sum(len(row.labels) for row in rows)

        # Gradients of the rows add up to that of the mean over all target tokens; nothing is scaled afterwards.
        losses = []
        for row in rows:
            scaled = bare.loss_sum(row) * scale
            scaled.backward()
            losses.append(scaled.detach())

        if config.get("clip_grad_norm") is not None:
            nn.utils.clip_grad_norm_(bare.model.parameters(), float(config.clip_grad_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if lr_scheduler is not None:
            lr_scheduler.step()
        logger.log("loss", torch.stack(losses).sum().item(), number)


class BareRow(NamedTuple):
    """Concatenated samples of t tokens with n targets."""

    lengths: list[int]  # of each sample
    tokens: Tensor  # [1, t]
    positions: Tensor  # [1, t], from 0 in each sample
    target_positions: Tensor  # [n], positions in the row whose next token is a target
    labels: Tensor  # [n]


def pack(samples: Sequence[Sample]) -> BareRow:
    """Concatenates samples with ``tokens`` and ``labels``."""
    lengths = [len(sample["tokens"]) for sample in samples]
    positions = torch.cat([torch.arange(length) for length in lengths])
    # Labels are shifted within each sample: its last position predicts nothing, not the next sample's first token.
    next_labels = torch.tensor([label for sample in samples for label in [*sample["labels"][1:], IGNORE_INDEX]])
    target_positions = (next_labels != IGNORE_INDEX).nonzero().squeeze(1)
    tokens = torch.tensor([token for sample in samples for token in sample["tokens"]])
    return BareRow(lengths, tokens[None], positions[None], target_positions, next_labels[target_positions])


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
        self.model.unembed = lambda hidden: hidden  # the model returns hidden states, see loss_sum

    def loss_sum(self, row: BareRow) -> Tensor:
        """Returns the summed cross-entropy of a row's targets [nats], [] in fp32."""
        self._lengths = row.lengths
        tokens, positions, target_positions, labels = (tensor.to(self._device) for tensor in row[1:])
        hidden = self.model(tokens, input_pos=positions)[0]
        # Logits [n, v] instead of [t, v]: targets are often a fraction of the tokens.
        hidden = self.model.norm(hidden.index_select(0, target_positions))
        return F.cross_entropy(self.model.output(hidden).float(), labels, reduction="sum")

    def _attend_per_sample(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        # The backward of each slice, unlike that of split, would allocate a row of zeros.
        split = [tensor.split(self._lengths, 2) for tensor in (q, k, v)]
        attended = [
            F.scaled_dot_product_attention(*part, is_causal=True)  # type: ignore[misc]
            for part in zip(*split, strict=True)
        ]
        return torch.cat(attended, dim=2)
