"""What peers of several kinds need, such as the samples in their order and the gradients that they hand over."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torchtune
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtune import config as torchtune_config
from torchtune import training
from torchtune.modules import MultiHeadAttention, TransformerDecoder
from torchtune.utils import get_device

from recipe_utils.benchmark.start_adapters import load_start
from recipe_utils.checkpoint.tensors import unwrapped
from recipe_utils.data.loader.sampler import epoch_permutation
from recipe_utils.data.loader.samples import Sample, load_dataset

Gradients = Callable[[], dict[str, Tensor]]
"""Returns the full gradient of each parameter, by its name in torchtune's model. On every rank."""
TakeModel = Callable[[Gradients], None]

IGNORE_INDEX = -100
STOCK_RECIPES = Path(torchtune.__file__).parents[1] / "recipes"


def samples_in_order(config: DictConfig, tokenizer: Any, num_ranks: int) -> list[Sample]:
    """The samples of the first epoch in the order in which the recipes visit them.

    Args:
        config: of a peer; the samples of ``max_steps_per_epoch`` update steps on all ranks are taken,
            those of the whole epoch if that is None.
        tokenizer: the config's.
        num_ranks: processes of the peer.
    """
    dataset = load_dataset(config.dataset, tokenizer)
    order = epoch_permutation(len(dataset), epoch=0, shuffle=config.get("shuffle", True))
    if config.max_steps_per_epoch is not None:
        per_step = config.batch_size * config.gradient_accumulation_steps * num_ranks
        order = order[: config.max_steps_per_epoch * per_step]
    return [dataset[i] for i in order.tolist()]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The full gradient of each parameter that has one, by its name without wrappers. All ranks together."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            gradients[unwrapped(name)] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return gradients


def make_lr_scheduler(config: DictConfig, optimizer: torch.optim.Optimizer) -> Any:
    """The schedule that the recipes follow over ``max_steps_per_epoch`` update steps, or None."""
    return torchtune_config.instantiate(
        config.get("lr_scheduler"),
        optimizer,
        num_training_steps=config.max_steps_per_epoch,
        last_epoch=-1,
    )


def do_nothing(*_: Any, **__: Any) -> None:
    """In place of what a benchmark has no use for."""


def let_stock_recipe_run_on_cpu(device: torch.device) -> None:
    """Torchtune 0.6.1's distributed recipes ask for memory figures that only accelerators have."""
    if device.type == "cpu":
        training.get_memory_stats = do_nothing
        training.log_memory_stats = do_nothing
        training.cleanup_before_training = do_nothing


class Row(NamedTuple):
    """Samples side by side, t tokens with n targets."""

    lengths: list[int]
    """Tokens of each sample."""
    tokens: Tensor
    """[1, t]"""
    positions: Tensor
    """[1, t]; they restart with each sample."""
    target_positions: Tensor
    """[n]: where in the row something is to be predicted."""
    labels: Tensor
    """[n]: what."""


def row_of(samples: Sequence[Sample]) -> Row:
    """Puts samples with ``tokens`` and ``labels`` side by side, without padding."""
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
    """A decoder without ranks, compiling or checkpointing, which projects only targets onto the vocabulary.

    It shares nothing with the update-step recipes.

    Args:
        config: of a peer; its model starts from its ``checkpointer``.

    Raises:
        ValueError: a model other than torchtune's ``TransformerDecoder``.
    """

    def __init__(self, config: DictConfig) -> None:
        self._device = get_device(config.device)
        dtype = training.get_dtype(config.dtype, device=self._device)
        with training.set_default_dtype(dtype), self._device:
            self.model = torchtune_config.instantiate(config.model)
        if not isinstance(self.model, TransformerDecoder):
            raise ValueError(
                f"model: {type(self.model).__name__} is no torchtune TransformerDecoder"
            )
        load_start(self.model, config)
        self._lengths: list[int] = []
        for module in self.model.modules():
            if isinstance(module, MultiHeadAttention):
                module._attention_call = self._attend_per_sample
        self.model.max_seq_len = 2**31  # a row may be longer than a sample; positions restart
        self.model.unembed = lambda hidden: hidden

    def log_probs(self, row: Row) -> Tensor:
        """Log-probability of each target of a row, [n] in fp32 [nats]."""
        self._lengths = row.lengths
        tokens, positions, target_positions, labels = (each.to(self._device) for each in row[1:])
        hidden = self.model(tokens, input_pos=positions)[0]
        hidden = self.model.norm(hidden.index_select(0, target_positions))
        logits = self.model.output(hidden).float()
        return -F.cross_entropy(logits, labels, reduction="none")

    def _attend_per_sample(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        # Split and not sliced: the backward of each slice would allocate a whole row of zeros.
        split = [each.split(self._lengths, 2) for each in (q, k, v)]
        return torch.cat(
            [
                F.scaled_dot_product_attention(*part, is_causal=True)  # type: ignore[misc]
                for part in zip(*split, strict=True)
            ],
            dim=2,
        )
