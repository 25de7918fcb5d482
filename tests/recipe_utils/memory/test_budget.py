"""Simulated searches for a budget: rows of 0.6 to 1 of the budget, noise, and ranks that agree late."""

import math
import random
from collections import deque

import pytest

from recipe_utils.memory.budget import Measured, TokenBudget, rounded

NUM_DELAYED = 4
LIMIT = 0.92  # of the memory


def searched(seed, power, noise, seconds=lambda tokens: 1 / tokens, num_ranks=1, jump_at=None):
    """Returns the best budget of the tightest rank, budgets of 160 update steps, and peaks over the memory."""
    rng = random.Random(seed)
    ranks = []
    for _ in range(num_ranks):
        best, before, room = (rng.uniform(*each) for each in ((4e3, 6e4), (5e9, 4e10), (5e9, 4e10)))
        constant = rng.choice((0, 0.1, 0.3, 0.6)) * room
        ranks.append((best, before, before + room, constant, (room - constant) / best**power))
    tightest = min(best for best, *_ in ranks)
    budgets = [TokenBudget(num_delayed=NUM_DELAYED) for _ in ranks]
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
                budget.add(tokens, longest, Measured(int(before), int(before + added), int(limit)))
        if step:
            is_latest = all(each == tokens for each in planned)
            budgets[0].take_time(tokens, seconds(tokens) * (1 + rng.gauss(0, 0.01)), is_latest)
        found.append(tokens)
    assert budgets[0].is_settled
    return tightest, found, peaks


@pytest.mark.parametrize("power", [1, 1.5, 2])
def test_in_600_memories_it_finds_the_largest_budget_and_never_more(power):
    for noise in (0.0, 0.02):
        found = [searched(seed, power, noise) for seed in range(100)]
        assert max(max(peaks) for *_, peaks in found) < 0.95
        ends = sorted(budgets[-1] / best for best, budgets, _ in found)
        assert ends[0 if noise == 0 else 1] > 0.9  # noise near the limit lowers one in a hundred
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
    add = TokenBudget.add
    monkeypatch.setattr(
        TokenBudget, "add", lambda self, tokens, longest, *rest: add(self, tokens, tokens, *rest)
    )
    assert max(max(searched(seed, 2, 0.0)[2]) for seed in range(20)) > 0.95


def test_it_settles_on_the_smallest_budget_that_is_as_fast_as_the_best():
    for seed in range(20):
        _, found, _ = searched(seed, 1, 0.0, lambda tokens: 1.1 if tokens < 3000 else 1.0)
        assert len(set(found[-20:])) == 1
        assert 3000 <= found[-1] <= 8192


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
    budget.add(2048, 2000, Measured(0, 500, 1000, has_retried=True))
    assert budget.proposal == rounded(0.85 * 2000)


@pytest.mark.parametrize("has_retried", [False, True])
def test_a_rank_with_dummy_rows_only_at_most_halves_the_budget(has_retried):
    budget = TokenBudget(8192)
    for budget_in_use in (8192, 4096):
        budget.add(budget_in_use, 16, Measured(0, 1001, 1000, has_retried))
        assert budget.proposal == budget_in_use // 2


def test_a_search_that_starts_again_waits_again():
    budget = TokenBudget(num_delayed=2)
    full = Measured(0, 1000, 1000)

    def num_steps():
        for number in range(100):
            budget.add(2048, 2000, full)
            if budget.take_time(2048, 1.0, is_latest=True):
                return number
        return None

    first = num_steps()
    budget.search_again()
    assert num_steps() >= first - 1 > 8
