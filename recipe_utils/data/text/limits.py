"""Limits that a model sets for rows of text."""

import math
from typing import NamedTuple

from recipe_utils.data.plan.cost import MicrobatchCost
from recipe_utils.settings.problems import ConfigError, Problem


class ModelLimits(NamedTuple):
    """Properties of a model that samples, rows and their costs depend on."""

    vocab_size: int
    """Number of token embeddings."""
    max_seq_len: int
    """Longest sequence that the model takes [tokens]."""
    cost: MicrobatchCost
    other_attention: str | None = None
    """Attention class that cannot keep the documents of a row apart; None if all can."""
    num_row_lengths: int | None = None
    """Number of lengths that packed rows may have, if code is compiled for each; None for any."""
    num_row_lengths_with_shared_prefixes: int | None = None
    """The same for rows with prefix-shared pairs; None for as many."""
    row_multiple: int | None = None
    """Number of positions that packed rows are padded to a multiple of; None for no padding."""
    packing_problem: Problem | str | None = None
    """Reason why packed rows cannot be computed, and what to set instead; None if they can."""
    packing_problem_with_shared_prefixes: Problem | str | None = None
    """The same for rows with prefix-shared pairs; None for no problem of their own."""
    num_heads: tuple[tuple[str, int], ...] = ()
    """Attention heads of a tensor-parallel rank, by the config key that sets them."""
    spanning_problem: str | None = None
    """Reason why no other rank can compute a part of a row, and what to set instead; None if it can."""
    shares_prefixes_over_ranks: bool = True
    """False if prefix-shared pairs are computed on one rank only."""
    limits_length: str = "the model's"
    """Owner of ``max_seq_len``, for errors."""
    costs_are_estimated: bool = False
    """True if ``cost`` was never measured on such a device."""

    def with_shared_prefixes(self) -> "ModelLimits":
        """Returns the limits of rows with prefix-shared pairs."""
        spanning_problem = self.spanning_problem
        if not self.shares_prefixes_over_ranks:
            text = "pairs that share a prefix are computed on one rank; set prefix_sharing=False"
            spanning_problem = spanning_problem or text
        return self._replace(
            spanning_problem=spanning_problem,
            num_row_lengths=self.num_row_lengths_with_shared_prefixes or self.num_row_lengths,
            packing_problem=self.packing_problem_with_shared_prefixes or self.packing_problem,
        )

    def longest_row(self, max_tokens: int | None, most_samples: int) -> int:
        """Returns an upper bound of a row, padding included [positions].

        Without ``max_tokens``, a row has at most ``most_samples`` samples.
        """
        return (max_tokens or 0) + most_samples * self.max_seq_len + (self.row_multiple or 0)


def row_multiple_of_packed(
    limits: ModelLimits, row_length: int | None, max_ranks_per_row: int = 1
) -> int | None:
    """Returns the divisor of all lengths of packed rows [positions]; None for any length.

    Args:
        limits: limits of the model.
        row_length: longest row with more than one sample, on each of its ranks [tokens]; None for no
            bound.
        max_ranks_per_row: most ranks that compute a row together.

    Raises:
        ConfigError: the model cannot compute packed rows, or no rows that span ranks.
    """
    problems: list[Problem | str] = []
    if limits.other_attention is not None:
        text = (
            f"the model's {limits.other_attention} cannot keep the documents of a row apart; set "
            "microbatching=least_padding"
        )
        problems.append(Problem("microbatching", text, "packed"))
    elif limits.packing_problem is not None:
        problems.append(limits.packing_problem)
    if limits.num_row_lengths is not None and row_length is None:
        text = (
            "without max_tokens_per_microbatch or tokenizer.max_seq_len rows have no fixed length, which "
            "compile=True and flex attention need; set one of the two"
        )
        problems.append(Problem("microbatching", text, "packed"))
    most = max_ranks_per_row
    if most > 1 and limits.spanning_problem is not None:
        problems.append(f"max_ranks_per_row={most}: {limits.spanning_problem}")
    for key, num_heads in limits.num_heads if most > 1 else ():
        if num_heads % most:
            text = f"{key}={num_heads} cannot be divided over {most} ranks"
            instead = f"set it to {math.gcd(num_heads, most)}"
            problems.append(Problem("max_ranks_per_row", f"{text}; {instead}", most))
    if problems:
        raise ConfigError(*problems)
    if limits.num_row_lengths is None or row_length is None:
        return limits.row_multiple
    multiple = limits.row_multiple or 1
    return math.ceil(row_length / limits.num_row_lengths / multiple) * multiple
