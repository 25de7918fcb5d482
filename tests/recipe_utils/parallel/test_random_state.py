"""Restored generators continue their sequences."""

import random

import numpy as np
import pytest
import torch

from recipe_utils.parallel.random_state import get_random_state, set_random_state


def draw():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3)]


@pytest.mark.parametrize("half_a_pair_is_waiting", [False, True])
def test_every_generator_continues_its_sequence(half_a_pair_is_waiting):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    if half_a_pair_is_waiting:
        random.gauss(0, 1)
        np.random.randn()
    state = get_random_state()
    expected = draw()
    draw()
    set_random_state(state)
    drawn = draw()
    assert drawn[:-1] == expected[:-1]
    assert torch.equal(drawn[-1], expected[-1])


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_something_else_than_a_state_is_refused(name):
    with pytest.raises(ValueError, match=r"state|words"):
        set_random_state(get_random_state() | {name: torch.zeros(7, dtype=torch.int64)})
