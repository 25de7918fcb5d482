"""Simulated searches for a budget: rows of 0.6 to 1 of the budget, noise, and ranks that agree late."""

import math
import random
from collections import deque

import pytest

from recipe_utils.data.meter import Measured
from recipe_utils.data.search import TokenBudget, rounded

NUM_DELAYED = 4
LIMIT = 0.9  # of the memory


def searched(seed, power, noise, num_ranks=1, jump_at=None):
    """Returns the best budget of the tightest rank, budgets of 160 update steps, and peaks over the memory."""
    rng = random.Random(seed)
    ranks = []
    for _ in range(num_ranks):
        best, before, room = (rng.uniform(*each) for each in ((4e3, 6e4), (5e9, 4e10), (5e9, 4e10)))
        constant = rng.choice((0, 0.1, 0.3, 0.6)) * room
        ranks.append((best, before, before + room, constant, (room - constant) / best**power))
    tightest = min(best for best, *_ in ranks)
    budgets = [TokenBudget() for _ in ranks]
    planned, found, peaks = deque([2048] * NUM_DELAYED), [], []
    for step in range(160):
        tokens = planned.popleft()
        planned.append(min(budget.proposal for budget in budgets))
        for budget, (_, before, limit, constant, growth) in zip(budgets, ranks, strict=True):
            longest = int(rng.uniform(0.6, 1) * tokens)
            added = (constant + growth * longest**power) * (1 + rng.gauss(0, noise / 2))
            before += 0.1 * limit if jump_at is not None and step >= jump_at else 0
            peaks.append(LIMIT * (before + added) / limit)
            if step:
                budget.add(longest, Measured(int(before), int(before + added), int(limit)))
        found.append(tokens)
    return tightest, found, peaks


@pytest.mark.parametrize("power", [1, 1.5, 2])
def test_in_600_memories_it_finds_the_largest_budget_and_never_more(power):
    for noise in (0.0, 0.02):
        found = [searched(seed, power, noise) for seed in range(100)]
        assert max(max(peaks) for *_, peaks in found) < 0.92
        ends = sorted(budgets[-1] / best for best, budgets, _ in found)
        assert ends[0] > 0.9
        assert ends[50] > 0.95


def test_a_power_through_two_rows_passes_the_memory(monkeypatch):
    """The constant hides the growth; therefore the search extrapolates a parabola."""

    def by_power(self, longest, step):
        self.rows = {**getattr(self, "rows", {}), longest: step.peak - step.before}
        (less, few), (most, many) = min(self.rows.items()), max(self.rows.items())
        room = step.limit - step.before
        if most == less or many <= few:
            return 2 * most
        power = math.log(many / few) / math.log(most / less)
        return min(2 * most, most * (room / many) ** (1 / max(power, 0.05)))

    monkeypatch.setattr(TokenBudget, "_largest_after", by_power)
    assert max(max(searched(seed, 2, 0.0)[2]) for seed in range(20)) > 1


def test_growing_from_the_budget_instead_of_its_rows_passes_the_memory(monkeypatch):
    """Rows have 0.6 to 1 of the budget."""
    add = TokenBudget.add
    monkeypatch.setattr(TokenBudget, "add", lambda self, longest, step: add(self, self.proposal, step))
    assert max(max(searched(seed, 2, 0.0)[2]) for seed in range(20)) > 0.95


def test_ranks_take_the_least_of_what_fits_them():
    for seed in range(20):
        best, found, peaks = searched(seed, 1.5, 0.02, num_ranks=4)
        assert max(peaks) < 0.95
        assert found[-1] > 0.85 * best


def test_a_peak_that_appears_later_lowers_the_budget():
    for seed in range(20):
        _, found, peaks = searched(seed, 1, 0.0, jump_at=120)
        assert max(peaks[120:]) > LIMIT
        assert found[-1] < found[119]
        assert max(peaks[-10:]) < 1.01 * LIMIT


def test_a_row_for_which_the_allocator_freed_blocks_was_too_long():
    budget = TokenBudget()
    budget.add(2000, Measured(0, 500, 1000, has_retried=True))
    assert budget.proposal == rounded(0.85 * 2000)


@pytest.mark.parametrize("has_retried", [False, True])
def test_a_rank_with_dummy_rows_only_does_not_lower_the_budget(has_retried):
    budget = TokenBudget(8192)
    budget.add(16, Measured(0, 1001, 1000, has_retried))
    assert budget.proposal == 8192
