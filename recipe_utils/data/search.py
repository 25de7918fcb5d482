"""Search for the tokens of a microbatch, while training: each trial is an update step with the exact gradient."""

from recipe_utils.data.meter import Measured
from recipe_utils.plans.microbatching import FIRST_TOKENS, MOST_TOKENS
from recipe_utils.text.collator import RowCollator
from recipe_utils.update_steps.loader import RowBudget

_AFTER_RETRY = 0.85
"""Factor of a row for which the allocator had to free its cached blocks."""
_NOISE = 1.02
"""Factor of measured bytes, so that noise does not hide their growth."""
NUM_DIGITS = 6
"""Binary digits of budgets: few, so that noise changes nothing."""
_SAFE = 0.85
"""Factor of the tokens of a row that did not fit."""
_OF_ONE_SAMPLE = (
    "a row is one sample there; set enable_activation_checkpointing=True, max_ranks_per_row=2 (packed), or a "
    "smaller tokenizer.max_seq_len"
)


def rounded(tokens: float, num_digits: int = NUM_DIGITS) -> int:
    """Returns the largest number of at most ``tokens`` with so many binary digits, at least 1."""
    shift = max(int(tokens).bit_length() - num_digits, 0)
    return max(int(tokens) >> shift << shift, 1)


class TokenBudget:
    """Largest budget that fits this rank.

    Rows of 2,000 and 4,000 tokens took 10 and 19.6 GiB, so with 2 % noise bytes grow by at most
    (20 - 10) / (4,000**2 - 2,000**2) per squared token. Where 32 GiB fit, the next rows have
    sqrt(4,000**2 + (32 - 19.6) * 1.2e6) = 5,560 tokens. This parabola bounds any growth between linear and
    quadratic, with any constant. The budget at most doubles the longest row *that ran*. A peak above the limit
    lowers it for the rest of the run.

    Args:
        first: first budget [tokens].
        num_digits: binary digits of proposals; 1 for doublings.
    """

    def __init__(self, first: int = FIRST_TOKENS, num_digits: int = NUM_DIGITS) -> None:
        self.largest: float = first
        """Upper bound of all proposals so far."""
        self._num_digits = num_digits
        self._most = MOST_TOKENS  # after peaks above the limit
        self._shortest, self._longest = (MOST_TOKENS, 0), (0, 0)  # rows that ran, and bytes added

    @property
    def proposal(self) -> int:
        """Returns the budget that this rank proposes [tokens]."""
        return rounded(min(self.largest, self._most), self._num_digits)

    def add(self, longest: int, step: Measured, cap: int = MOST_TOKENS) -> None:
        """Adds an update step that ran.

        Args:
            longest: most positions of a microbatch.
            step: its memory.
            cap: bound of the growth [tokens]; 0 to ignore an update step that fits.
        """
        if longest < self.proposal // 4:  # dummy rows and rests are hardly the cause of a peak
            return
        if step.peak > step.limit or step.has_retried:
            fits = max(step.limit - step.before, 0) / max(step.peak - step.before, 1)
            factor = min(max(fits, 0.5), _AFTER_RETRY if step.has_retried else 1)
            self._most = min(self._most, max(int(longest * factor), 1))
        elif cap:
            self.largest = max(self.largest, min(self._largest_after(longest, step), cap))

    def _largest_after(self, longest: int, step: Measured) -> float:
        """Returns the longest row that fits, given those that ran."""
        added = max(step.peak - step.before, 1)
        self._shortest = min(self._shortest, (longest, added))
        # The longest row may take what a shorter one took.
        self._longest = max(self._longest[0], longest), max(self._longest[1], added)
        (longest, most), (shortest, least) = self._longest, self._shortest
        if shortest > 0.8 * longest:
            shortest, least = 0, 0
        growth = (_NOISE * most - least) / (longest**2 - shortest**2)
        room = max(step.limit - step.before - most, 0)
        return min(2 * longest, (longest**2 + room / growth) ** 0.5)


class SearchedBudget(RowBudget):
    """Budget of update steps that are planned from now on: the least proposal of all ranks."""

    def __init__(self, collator: RowCollator) -> None:
        # With few lengths, kernels are compiled for each: budgets double.
        self._num_digits = 1 if collator.has_few_lengths else NUM_DIGITS
        assert collator.bounds.max_tokens is not None
        self.search = TokenBudget(collator.bounds.max_tokens, self._num_digits)
        super().__init__(collator, lambda: self.search.proposal)

    def restart(self, tokens: int) -> None:
        """Continues a search that had found so many tokens."""
        self.search = TokenBudget(tokens, self._num_digits)
        self.take(tokens)


def advice_for(budget: RowBudget, tokens: int) -> str:
    """Returns what to set after a row of ``tokens`` positions did not fit; 0 tokens for inputs without rows."""
    collator = budget.collator()
    if not isinstance(collator, RowCollator) or not collator.settings.plans_by_tokens:
        return f"set {'microbatching=packed, or ' * bool(tokens)}a smaller batch_size"
    # A row above its bound is one sample, which no smaller bound makes shorter.
    bound: float | None = collator.bounds.max_tokens
    if isinstance(budget, SearchedBudget):
        bound = budget.search.largest
    elif bound is not None:
        multiple = collator.layout.row_multiple or 1
        bound = -(-bound // multiple) * multiple  # rows are padded
    if bound is not None and tokens > bound:
        return _OF_ONE_SAMPLE
    safe = collator.with_budget(int(_SAFE * tokens)).bounds.max_tokens
    return f"set max_tokens_per_microbatch={safe}, with which a resume has the same losses"
