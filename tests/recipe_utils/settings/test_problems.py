"""Errors of components are reported as problems of their keys."""

import operator

import pytest

from recipe_utils.settings.problems import ConfigError, Problem, build


def fail(error, cause=None):
    raise error from cause


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError("x.model is gone"), "dataset: x.model is gone"),
        (ValueError("dataset.path=x: not there"), "dataset.path=x: not there"),
        (ValueError("dataset[0].path: not there"), "dataset[0].path: not there"),
        (ValueError("datasets: not there"), "dataset: datasets: not there"),
        (ConfigError(Problem("lr", "too high", 9)), "lr=9: too high"),
    ],
)
def test_an_error_names_its_key(error, expected):
    with pytest.raises(ConfigError) as raised:
        build("dataset", fail, error)
    assert [*map(str, raised.value.problems)] == [expected]


def test_the_cause_of_an_error_is_a_part_of_the_problem():
    with pytest.raises(ConfigError, match=r"model: x.pt is gone \(disk\)"):
        build("model", fail, OSError("x.pt is gone"), cause=ValueError("disk"))
    assert build("loss", int, "3") == 3


def test_a_mistake_inside_a_component_keeps_its_traceback_with_a_note_of_the_key():
    with pytest.raises(TypeError, match="unsupported operand") as raised:
        build("model", operator.add, 1, "1")
    assert raised.value.__notes__ == ["raised while model of the config was made"]
    with pytest.raises(KeyboardInterrupt):
        build("model", fail, KeyboardInterrupt())
