"""Limits that a model sets for rows of text."""

import math
from typing import NamedTuple

from recipe_utils.data.loader.plan import MicrobatchCost
from recipe_utils.settings.settings import ConfigError


class ModelLimits(NamedTuple):
    """What samples, rows and their costs depend on in a model."""

    vocab_size: int
    """Number of token embeddings."""
    max_seq_len: int
    """Longest sequence that the model takes [tokens]."""
    cost: MicrobatchCost
    other_attention: str | None = None
    """The kind of attention that cannot keep the documents of a row apart; None if it can."""
    num_row_lengths: int | None = None
    """How many lengths packed rows may have, where code is compiled for each; None for any."""
    num_row_lengths_with_shared_prefixes: int | None = None
    """The same for rows with prefix-shared pairs; None for as many."""
    row_multiple: int | None = None
    """What packed rows are padded to a multiple of in any case [slots]; None for no padding."""
    packing_problem: str | None = None
    """Why packed rows cannot be computed here, and what to set instead; None if they can."""
    packing_problem_with_shared_prefixes: str | None = None
    """The same for rows with prefix-shared pairs; None for no problem of their own."""
    limits_length: str = "the model's"
    """Whose ``max_seq_len`` it is, for errors."""
    costs_are_estimated: bool = False
    """Whether ``cost`` was never measured on such a device."""

    def with_shared_prefixes(self) -> "ModelLimits":
        """Returns the limits of rows with prefix-shared pairs."""
        return self._replace(
            num_row_lengths=self.num_row_lengths_with_shared_prefixes or self.num_row_lengths,
            packing_problem=self.packing_problem_with_shared_prefixes or self.packing_problem,
        )

    def longest_row(self, max_tokens: int | None, most_samples: int) -> int:
        """Bound on a row, padding included [slots].

        Args:
            max_tokens: that a row is filled up to.
            most_samples: of a row that no such bound is set for.
        """
        return (max_tokens or 0) + most_samples * self.max_seq_len + (self.row_multiple or 0)


def row_multiple_of_packed(limits: ModelLimits, row_length: int | None) -> int | None:
    """What the lengths of packed rows are to be multiples of [tokens]; None if they may have any.

    Args:
        limits: of the model.
        row_length: the longest row, unless a single sample is longer [tokens]; None if there is no bound.

    Raises:
        recipe_utils.settings.settings.ConfigError: ``microbatching: packed`` cannot be with this model.
    """
    problems = []
    if limits.other_attention is not None:
        problems.append(
            f"microbatching=packed: the model's {limits.other_attention} cannot keep documents of a row "
            "apart; set microbatching=least_padding"
        )
    elif limits.packing_problem is not None:
        problems.append(limits.packing_problem)
    if limits.num_row_lengths is not None and row_length is None:
        problems.append(
            "microbatching=packed: without max_tokens_per_microbatch and tokenizer.max_seq_len rows "
            "have no fixed length, which compile=True and flex attention need; set one of the two"
        )
    if problems:
        raise ConfigError(*problems)
    if limits.num_row_lengths is None or row_length is None:
        return limits.row_multiple
    multiple = limits.row_multiple or 1
    return math.ceil(row_length / limits.num_row_lengths / multiple) * multiple
