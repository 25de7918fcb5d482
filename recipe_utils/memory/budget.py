"""Search for the tokens of a microbatch, while training: each trial is an update step with the exact gradient."""

from collections import defaultdict
from statistics import median
from typing import NamedTuple

FIRST_TOKENS = 2048
"""First budget. Small for any model that needs a GPU; the same on all ranks."""
MOST_TOKENS = 2**20
"""Largest budget."""
_AFTER_RETRY = 0.85
"""Factor of a row for which the allocator had to free its cached blocks."""
_NOISE = 1.02
"""Factor of the bytes of the longest row, so that noise does not hide their growth."""
_NUM_STEPS = 8
"""Update steps without a larger budget before the search ends, besides the delay of a proposal."""
_SLOWER = 1.03
"""Factor of the least time that a smaller budget may take."""


class Measured(NamedTuple):
    """Memory of an update step on this rank [bytes]."""

    before: int
    """Bytes before the first forward."""
    peak: int
    limit: int
    """Bytes that ``peak`` may reach."""
    has_retried: bool = False
    """True if the allocator freed its cached blocks to find space, as it does before it fails."""


_NUM_DIGITS = 6
"""Binary digits of budgets: few, so that noise changes nothing."""


def rounded(tokens: float, num_digits: int = _NUM_DIGITS) -> int:
    """Returns the largest number of at most ``tokens`` with so many binary digits, at least 1."""
    shift = max(int(tokens).bit_length() - num_digits, 0)
    return max(int(tokens) >> shift << shift, 1)


class TokenBudget:
    """Search for the largest budget that fits this rank; on the rank that takes times, for the fastest.

    The budget grows from below: to at most twice the longest row *that ran*, and to at most the row at
    which a parabola through two measured rows reaches the limit. The parabola bounds any growth between
    linear and quadratic, with any constant. Once the budget stops growing, the search takes the smallest
    one tried whose median time per token is within 3 % of the best. Ranks use their least proposal.

    Args:
        first: first budget [tokens].
        num_delayed: update steps between a proposal and the first one that is planned with it.
    """

    def __init__(self, first: int = FIRST_TOKENS, num_delayed: int = 4) -> None:
        self.proposal = first
        """Budget that this rank proposes [tokens]."""
        self.is_settled = False
        """True once the search has ended, on the rank that takes times."""
        self._most = MOST_TOKENS  # bound by peaks above the limit, for the rest of the run
        self._fits: float = first
        self.num_digits = _NUM_DIGITS
        """Binary digits of proposals; 1 for doublings."""
        self._num_delayed = num_delayed
        self._rows: dict[int, tuple[int, int]] = {}  # longest rows that ran, and bytes added
        self._tokens = 0  # budget of the last update step
        self._num_steps = 0  # update steps with it before the last one
        self._seconds: dict[int, list[float]] = defaultdict(list)

    def add(self, tokens: int, longest: int, step: Measured, cap: int = MOST_TOKENS) -> None:
        """Adds an update step that ran.

        Args:
            tokens: its budget.
            longest: most positions of a microbatch.
            step: its memory.
            cap: bound of the growth [tokens]; 0 to ignore an update step that fits.
        """
        self._num_steps = self._num_steps + 1 if tokens == self._tokens else 0
        self._tokens = tokens
        if step.peak > step.limit or step.has_retried:
            fits = max(step.limit - step.before, 0) / max(step.peak - step.before, 1)
            factor = min(max(fits, 0.5), _AFTER_RETRY if step.has_retried else 1)
            # Rows much shorter than the budget, such as dummy ones, are hardly the cause.
            self._most = min(self._most, max(int(longest * factor), tokens // 2, 1))
        elif cap and not self.is_settled:
            self._fits = max(self._fits, min(self._largest_after(longest, step), cap))
        self._propose()

    def _largest_after(self, longest: int, step: Measured) -> float:
        """Returns the longest row that fits, given those that ran."""
        # Of about equal lengths one row is kept, with the most bytes.
        length, added = rounded(longest), step.peak - step.before
        row = self._rows.get(length, (0, 0))
        self._rows[length] = max(row[0], longest), max(row[1], added)
        longest, added = self._rows[max(self._rows)]
        shorter = max((each for each in self._rows if each < 0.8 * longest), default=0)
        shorter, less = self._rows.get(shorter, (0, 0))
        growth = (_NOISE * added - less) / max(longest**2 - shorter**2, 1)
        room = step.limit - step.before - added
        if growth <= 0 or room <= 0:
            return 2.0 * longest if room > 0 else longest
        return min(2 * longest, (longest**2 + room / growth) ** 0.5)

    def take_time(self, tokens: int, seconds_per_token: float, is_latest: bool) -> str:
        """Adds the time of an update step; call it on one rank only.

        ``is_latest`` is False if an update step is already planned with another budget. Returns why the
        search has ended, or "".
        """
        if self.is_settled:
            return ""
        self._seconds[tokens].append(seconds_per_token)
        has_waited = self._num_steps >= self._num_delayed + _NUM_STEPS
        if not (has_waited and is_latest and tokens == self._tokens):
            return ""
        times = {budget: median(each) for budget, each in sorted(self._seconds.items())}
        best = min(times.values())
        wanted = next(budget for budget, each in times.items() if each <= _SLOWER * best)
        self.start_at(wanted, is_settled=True)
        if wanted == tokens:
            return "larger ones do not fit, or an update step does not fill them"
        return f"{tokens:,} fit, and are {times[tokens] / times[wanted] - 1:+.0%} slower"

    def search_again(self) -> None:
        """Ends what :meth:`start_at` or :meth:`take_time` settled: rows may become longer."""
        self.is_settled, self._num_steps = False, 0

    def start_at(self, tokens: int, is_settled: bool) -> None:
        """Continues with a budget; ends the search if it is settled."""
        self.is_settled = is_settled
        self._fits = tokens
        self._propose()

    def _propose(self) -> None:
        self.proposal = rounded(min(self._fits, self._most), self.num_digits)
