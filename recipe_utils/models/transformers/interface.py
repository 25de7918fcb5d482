"""Decoders of transformers for code that does not import transformers, which takes seconds: what they compute."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from recipe_utils.models.attention.exchange import RowGroups
from recipe_utils.models.attention.kernels import AttentionNeeds
from recipe_utils.text.images.sample import Join
from recipe_utils.text.limits import Kernel, Layout, PackedAttention

Axes = dict[str, list[int]]
"""Path of a tensor in (args, kwargs, output) of a module -> its dimensions of positions."""


@dataclass(frozen=True)
class PackingCheck:
    """Result of the start-up check of a decoder.

    Attributes:
        head_is_tail: the output layer alone computes logits from hidden states.
        problem: the module that mixes documents; rows are padded. None if packed rows are exact.
        modules: classes of modules that run once for each document, with the axes of their tensors.
        error: largest relative difference of a gradient.
        splits_attention: attention computes one document after the other, else by a mask [b, s, s].
        head_dims: widths of keys and values.
        attention_needs: see :attr:`.AttentionNeeds.others`.
        computes_trees: sequences may share what they begin with in a packed row.
        can_be_cut: pipeline stages of any layers compute packed rows.
        spans_ranks: ranks may compute parts of a row; all but attention is computed token by token.
        joins: how tensors of several samples with images become one, by the model's argument; empty: it takes no images.
        unreached: parameters of towers that no image reaches, such as a layer behind the one whose output is taken.
    """

    head_is_tail: bool
    problem: str | None = None
    modules: dict[str, Axes] = field(default_factory=dict)
    error: float = 0.0
    splits_attention: bool = False
    head_dims: tuple[tuple[int, int], ...] = ()
    attention_needs: tuple[str, ...] = ()
    computes_trees: bool = False
    can_be_cut: bool = False
    spans_ranks: bool = False
    joins: Mapping[str, Join] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()

    def __str__(self) -> str:
        how = "packed rows are exact"
        if self.problem:
            how = f"rows are padded, since {self.problem} mixes the documents of a packed row"
        elif self.modules:
            how += f"; {', '.join(self.modules)} runs by document"
        return f"{how} (gradients of a small copy equal those of separate samples to {self.error:.0e})"


ErrorOn = Callable[[torch.device, Kernel], str | None]
"""Returns the error of a kernel on a GPU; None if it is exact there."""


class DecoderOfTransformers(nn.Module):
    """A :class:`.decoder.Decoder`, and what it computes in packed rows."""

    model: Any
    """A ``PreTrainedModel``."""
    check: PackingCheck
    num_kv_heads: int
    error_on: ErrorOn | None
    _base: str
    """Attention of separate documents: ``sdpa`` or ``eager``."""

    @property
    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """Returns the layers, which are sharded, compiled and recomputed one by one."""

    @property
    @abstractmethod
    def output_is_tied(self) -> bool:
        """Returns True if the output layer shares its weight with the token embeddings."""

    @abstractmethod
    def cut_to_stage(self, layers: range) -> None:
        """Removes all modules with weights but those of one pipeline stage, in place."""

    @abstractmethod
    def recompute_layers(self, interval: int) -> None:
        """Recomputes every ``interval``-th layer in the backward, with the documents of its forward."""

    @abstractmethod
    def fingerprint(self, folder: str | Path | None) -> str:
        """Returns the CRC-32 of what ``config.json`` describes. Raises ValueError if that in ``folder`` differs."""

    @abstractmethod
    def of_images(self) -> list[nn.Parameter]:
        """Returns the parameters that text does not pass through: those of towers and projectors."""

    def attend_within_documents(
        self, attention: PackedAttention, max_row_length: int = 0, row_groups: RowGroups = MappingProxyType({})
    ) -> None:
        """Sets the kernels of packed rows, their greatest length, and the groups of ranks that compute one together."""
        self.attention, self.row_groups = attention, dict(row_groups)
        text: Any = self.model.config.get_text_config()
        if hasattr(text, "max_seq_len"):  # MPT makes its bias of positions for as many
            text.max_seq_len = max(text.max_seq_len, max_row_length)

    def attention_needs(self) -> AttentionNeeds:
        """Returns what kernels of packed rows must support."""
        # The largest probability with which attention drops a key, under any name of transformers.
        text = vars(self.model.config.get_text_config())
        rates = [value for name, value in text.items() if "att" in name and "drop" in name]
        return AttentionNeeds(
            next(self.model.parameters()).dtype,
            frozenset(self.check.head_dims),
            float(max((rate for rate in rates if isinstance(rate, (int, float))), default=0.0)),
            frozenset(self.check.attention_needs),
            self.check.splits_attention,
            has_flex=self.model._supports_flex_attn,
            has_flash=self._base == "sdpa",
        )

    def refused_layouts(self) -> dict[Layout, str]:
        """Returns the layouts of packed rows that the model was not proved to compute, with the reasons."""
        check, name = self.check, type(self.model).__name__
        refused: dict[Layout, str] = {}
        if check.problem:
            text = f"{check.problem} mixes the documents of a row; set microbatching=least_padding"
            refused["packed"] = f"microbatching=packed: {text}"
        if not check.computes_trees:
            refused["trees"] = f"{name} does not compute trees as it computes their sequences"
        if not check.spans_ranks:
            reason = "has windows, or mixes tokens elsewhere than in causal attention"
            if check.joins:
                reason = "takes images, which are not cut"
            refused["over ranks"] = (
                f"{name} {reason}, so ranks do not compute parts of its rows; remove max_ranks_per_row"
            )
        return refused


def modules_for_images(model: nn.Module) -> set[str]:
    """Returns the names of the modules of a model that texts do not pass through; none if it takes no images."""
    if not isinstance(model, DecoderOfTransformers) or not model.check.joins:
        return set()
    of_images = set(map(id, model.of_images()))
    numbers = {name: [id(p) in of_images for p in module.parameters()] for name, module in model.named_modules()}
    return {name for name, are_of_images in numbers.items() if are_of_images and all(are_of_images)}
