"""Every key with values of every kind: each is either what the key's documented type says, or refused.

The table of keys that users read is the oracle: its type column says what is valid.
"""

import os
import re
import traceback

import pytest
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import run_recipe

from recipe_utils.settings import ConfigError, key_table, read_settings, settings_of

RECIPE = "full_finetune_update_step"
VALUES = ["hello", "False", 1.5, -1, 0, None, [], {}, 10**30]
MOST = {"seed": 2**32 - 1, "process_group_timeout_seconds": 1e9}
TYPES = {
    key: [part.strip() for part in type_text.split(" or ")]
    for key, type_text in re.findall(
        r"^\| `(\w+)` \| ([^|]*) \|", key_table(settings_of(RECIPE)), re.M
    )
}


def is_documented(key, value):
    """Whether the type column of the table of keys allows a value."""
    for part in TYPES[key]:
        kind, _, bound = part.partition(" > ")
        kind, _, least = kind.partition(" >= ")
        if value is None:
            fits = kind == "null"
        elif isinstance(value, str):
            fits = kind in ("str", value)
        elif isinstance(value, (int, float)):
            fits = kind == "float" or (kind == "int" and isinstance(value, int))
            fits &= value >= float(least or "-inf") and value > float(bound or "-inf")
            fits &= value <= MOST.get(key, 2**31 - 1 if kind == "int" else float("inf"))
            fits |= kind == str(value)
        else:
            # Without a path only the profiler knows what to make.
            fits = kind.startswith("list of") and value == [] and "component" not in kind
            fits |= (key == "profiler" or kind == "mapping") and value == {}
        if fits:
            return True
    return False


def test_the_table_has_every_key_once():
    assert len(TYPES) > 60
    assert {"batch_size", "microbatching", "clip_grad_norm", "optimizer"} <= TYPES.keys()


@pytest.fixture
def config(tiny_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where output_dir=hello goes
    return tiny_config(
        max_steps_per_epoch=1, dataset_val={"_component_": "tiny.tiny_dataset", "num_samples": 4}
    )


def problems_of(config):
    try:
        read_settings(OmegaConf.create(config), settings_of(RECIPE))
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("key", TYPES)
def test_a_value_is_documented_or_refused_by_the_name_of_its_key(key, config):
    for value in VALUES:
        problems = problems_of({**config, key: value})
        assert problems or is_documented(key, value), f"{key}={value!r} is taken silently"
        for problem in problems:
            assert re.search(rf"\b{key}\b", problem), f"{key}={value!r}: {problem}"
        if not is_documented(key, value):
            assert len(problems) == 1, problems


def train_each(config, folder):
    """For each key and value that the settings take: why it could not be trained with, if so."""
    os.chdir(folder)
    failed = {}
    for key in TYPES:
        for value in VALUES:
            changed = {**config, key: value}
            if problems_of(changed):
                continue
            try:
                run_recipe(changed)
            except ConfigError as error:
                if key not in str(error):
                    failed[key, str(value)] = str(error)
            except Exception:
                failed[key, str(value)] = traceback.format_exc()
    return failed


def test_what_is_taken_can_be_trained_with_or_is_refused_before_by_its_key(config, tmp_path):
    (failed,) = run_distributed(train_each, 1, config, str(tmp_path), timeout_seconds=300)
    assert failed == {}
