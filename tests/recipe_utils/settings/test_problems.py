"""Problems of components are collected by key and raised together."""

# ruff: noqa: PT012  the blocks of collected_problems are what is tested

import operator

import pytest

from recipe_utils.settings.problems import ConfigError, Problem, collected_problems


def fail(error):
    raise error


def read(path, cause=None):
    raise OSError(f"{path} is gone") from cause


def test_all_components_are_built_and_their_problems_raised_together_by_key():
    with pytest.raises(ConfigError) as raised, collected_problems() as build:
        build("tokenizer", read, "x.model")
        assert build("loss", int, "3") == 3
        build("model", read, "x.pt", cause=ValueError("disk"))
        build("dataset", fail, ValueError("dataset.path=x: not there"))
        build("dataset_val", fail, ValueError("dataset.path=x: not there"))
        build("optimizer", fail, ConfigError(Problem("lr", "too high", 9), Problem("eps", "low")))
    assert str(raised.value).splitlines() == [
        "6 problems in the config:",
        "  - tokenizer: x.model is gone",
        "  - model: x.pt is gone (disk)",
        "  - dataset.path=x: not there",
        "  - dataset_val: dataset.path=x: not there",
        "  - lr=9: too high",
        "  - eps: low",
    ]


def test_a_call_that_uses_a_failed_result_is_skipped():
    calls = []
    with pytest.raises(ConfigError) as raised, collected_problems() as build:
        tokenizer = build("tokenizer", read, "x.model")
        dataset = build("dataset", calls.append, tokenizer)
        build("dataset_val", calls.append, dataset)
        build("prompts", lambda: tokenizer.encode("a"))
        build("loss", fail, ValueError("unknown"))
        calls.append(tokenizer.eos_id)  # outside of build: the block ends here
    assert [str(problem) for problem in raised.value.problems] == [
        "tokenizer: x.model is gone",
        "loss: unknown",
    ]
    assert calls == []


def test_an_error_of_the_block_joins_the_collected_problems():
    with pytest.raises(ConfigError) as raised, collected_problems() as build:
        build("loss", fail, ValueError("unknown"))
        raise ConfigError(Problem("lr", "too high"))
    assert [str(problem) for problem in raised.value.problems] == ["loss: unknown", "lr: too high"]


def test_a_mistake_inside_a_component_keeps_its_traceback_with_a_note_of_the_key():
    with pytest.raises(TypeError, match="unsupported operand") as raised, collected_problems() as b:
        b("loss", read, "x")
        b("model", operator.add, 1, "1")
    assert raised.value.__notes__ == ["raised while model of the config was made"]
    with pytest.raises(KeyboardInterrupt), collected_problems() as build:
        build("model", fail, KeyboardInterrupt())
