"""Samples and packed rows that a model computes, and how long rows may be."""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.plans.microbatching import FIRST_TOKENS, MOST_TOKENS, MicrobatchSettings
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.text.documents import Documents
from recipe_utils.text.images.sample import Join
from recipe_utils.torchtune_names import log_once

Kernel = Literal["varlen", "flex", "by_document", "dense"]
Layout = Literal["packed", "trees", "over ranks"]
"""Packed rows, with trees, computed by several ranks."""

_NUM_FLEX_LENGTHS = 4
"""Lengths of packed rows for flex attention, which compiles for each. More lengths cost
compilations, fewer cost padding."""


@dataclass(frozen=True)
class PackedAttention:
    """Capability of a model: the layouts of packed rows that it computes, and its kernels."""

    kernel: Kernel = "by_document"
    why: str = ""
    """Reason for the kernel, for the log."""
    kernel_of_trees: Kernel | None = None
    """Kernel of rows with trees; None for the same."""
    refused: Mapping[Layout, str] = field(default_factory=dict)
    """Reasons against layouts that are not computed, and keys to set instead."""
    other_attention: str | None = None
    """Attention class that cannot keep the documents of a row apart; None if all can."""
    runs_by_document: bool = False
    """True if modules run by document, in microbatches of one row of any length."""
    num_heads: tuple[tuple[str, int], ...] = ()
    """Attention heads of a tensor-parallel rank, by the config key that sets them."""

    def reason_against(self, *layouts: Layout) -> str | None:
        """Returns the reason against the first of ``layouts`` that is refused; None if none is."""
        return next((self.refused[layout] for layout in layouts if layout in self.refused), None)

    def num_row_lengths(self, has_trees: bool = False) -> int | None:
        """Returns the number of lengths that packed rows may have; None for any."""
        kernel = (has_trees and self.kernel_of_trees) or self.kernel
        return _NUM_FLEX_LENGTHS if kernel == "flex" and not self.runs_by_document else None

    def refusals(self, trees: tuple[str, str] | None, num_ranks: int) -> Iterator[Problem | str]:
        """Yields reasons against packed rows over ``num_ranks`` each, with ``trees``."""
        if self.other_attention is not None:
            text = f"the model's {self.other_attention} cannot keep the documents of a row apart"
            text += "; set microbatching=least_padding"
            yield Problem("microbatching", text, "packed")
        elif reason := self.refused.get("packed"):
            yield reason
        elif trees and (reason := self.refused.get("trees")):
            yield f"{trees[0]}: {reason}; {trees[1]}"
        if num_ranks > 1 and (reason := self.refused.get("over ranks")):
            yield f"max_ranks_per_row={num_ranks}: {reason}"
        for key, num_heads in self.num_heads:
            if num_heads % num_ranks:
                text = f"{key}={num_heads} cannot be divided over {num_ranks} ranks"
                text += f"; set it to {math.gcd(num_heads, num_ranks)}"
                yield Problem("max_ranks_per_row", text, num_ranks)

    def kernel_of(self, documents: Documents) -> Kernel:
        """Returns the kernel of a microbatch; logs it once on an accelerator. Raises ConfigError if it is refused."""
        has_trees = documents.ends is not None
        layouts: tuple[Layout, ...] = ("packed", "trees") if has_trees else ("packed",)
        if reason := self.reason_against(*layouts):
            raise ConfigError(reason)
        kernel, why = self.kernel, self.why
        if has_trees and self.kernel_of_trees is not None:
            kernel, why = self.kernel_of_trees, f"rows contain trees, and {kernel} has no mask for them"
        if documents.cu_seqlens.device.type != "cpu":
            log_once(f"Attention of packed rows: {kernel}, because {why}")
        return kernel


class ModelLimits(NamedTuple):
    """Properties of the models of a recipe that samples, rows and their costs depend on."""

    vocab_size: int = sys.maxsize
    """Number of token embeddings."""
    max_seq_len: int = sys.maxsize
    """Longest sequence that the models take [tokens]."""
    cost: MicrobatchCost = MicrobatchCost()
    attentions: tuple[PackedAttention, ...] = (PackedAttention(),)
    """Attention of each model: the trained one and, if any, a teacher."""
    row_multiple: int | None = None
    """Number of positions that packed rows are padded to a multiple of; None for no padding."""
    limits_length: str = "the model's"
    """Owner of ``max_seq_len``, for errors."""
    joins: Mapping[str, Join] = {}
    """How the tensors of several samples with images become one, by the model's argument; empty: it takes no images."""
    tokens_per_pixel: float = 0.0
    """Work of the tower for one number of a tensor of images, in that for one token of text."""

    @property
    def merges_rows(self) -> bool:
        """Returns True if the rows of a packed dataset can become one row of any length."""
        return all(model.other_attention is None and model.num_row_lengths() is None for model in self.attentions)

    @property
    def shares_beginnings(self) -> bool:
        """Returns True if any packed row may contain trees, at the lengths of other rows."""
        return all(
            model.other_attention is None
            and model.reason_against("packed", "trees") is None
            and model.num_row_lengths() == model.num_row_lengths(has_trees=True)
            for model in self.attentions
        )

    def multiple_of_packed_rows(
        self, row_length: int | None, trees: tuple[str, str] | None = None, max_ranks_per_row: int = 1
    ) -> int | None:
        """Returns what all lengths of packed rows are multiples of [positions]; None for any length.

        ``row_length`` is the longest row with more than one sample, on each of its ranks [tokens]; ``trees`` are the
        ``key=value`` that makes trees, and what to set instead. Raises ConfigError for rows that a model cannot compute.
        """
        # All models of the recipe must compute these rows; what two refuse alike is reported once.
        problems: list[Problem | str] = []
        for attention in self.attentions:
            problems += [p for p in attention.refusals(trees, max_ranks_per_row) if p not in problems]
        # Few lengths for kernels that are compiled for each, of the model that takes fewest.
        limits = (attention.num_row_lengths(trees is not None) for attention in self.attentions)
        num_lengths = min((limit for limit in limits if limit is not None), default=None)
        if num_lengths is not None and row_length is None:
            text = (
                "without max_tokens_per_microbatch or tokenizer.max_seq_len rows have no fixed length, which "
                "flex attention needs; set one of the two"
            )
            problems.append(Problem("microbatching", text, "packed"))
        if problems:
            raise ConfigError(*problems)
        if num_lengths is None or row_length is None:
            return self.row_multiple
        # 1,000 tokens in 4 lengths and multiples of 16 are rows of 256, 512, 768 and 1,024.
        multiple = self.row_multiple or 1
        return math.ceil(row_length / num_lengths / multiple) * multiple


NO_LIMITS = ModelLimits()
"""Limits of samples without a model."""


class RowBounds(NamedTuple):
    """Lengths of rows, by config keys, the limits of models, and the tokenizer.

    ``batch_size=4`` of at most 512 tokens are microbatches of at most 2,048 positions, and with
    ``max_tokens_per_microbatch=1000`` of 1,000, or one longer sample.
    """

    settings: MicrobatchSettings = MicrobatchSettings()
    limits: ModelLimits = NO_LIMITS
    max_seq_len: int | None = None
    """Tokens to which samples are truncated; None if they are not."""
    num_rows: int = 1
    """Rows of a sample if padded."""
    budget: int | None = None
    """Positions per microbatch in place of ``max_tokens_per_microbatch``, as a search finds them."""

    @property
    def max_tokens(self) -> int | None:
        """Returns the most positions of a microbatch by key; None if their number of samples bounds them."""
        if self.budget is None and self.settings.max_tokens_per_microbatch != "auto":
            return self.settings.max_tokens_per_microbatch
        return FIRST_TOKENS if self.budget is None else self.budget

    @property
    def of_microbatch(self) -> int | None:
        """Returns the most positions of a microbatch of several samples; None if they are not known before its samples."""
        if self.max_tokens is None and self.max_seq_len is not None:
            return self.num_rows * self.settings.batch_size * self.max_seq_len
        return self.max_tokens

    @property
    def of_tree(self) -> int:
        """Returns the most positions of a tree; they are cut when read, before the budget of their update step is known."""
        if not self.settings.is_packed:
            return 1  # a tree of each sequence
        tokens = None if self.settings.is_searched else self.of_microbatch
        longest = self.settings.batch_size * (self.max_seq_len or self.limits.max_seq_len)
        return (tokens or longest) * self.settings.max_ranks_per_row

    @property
    def of_row(self) -> int:
        """Returns an upper bound of any row but a tree, padding included, also in validation and with any budget."""
        # A row longer than the budget is one sample, padded to a multiple below the budget.
        most_tokens = 2 * MOST_TOKENS if self.settings.is_searched else self.max_tokens or 0
        most_samples = self.num_rows * max(self.settings.batch_size, self.settings.batch_size_val or 0)
        return most_tokens + most_samples * self.limits.max_seq_len + (self.limits.row_multiple or 0)


NO_BOUNDS = RowBounds()
