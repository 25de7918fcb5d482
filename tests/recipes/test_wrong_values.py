"""Every key with values of every kind: each value has the key's documented type, or is refused.

The table of keys that users read is the oracle: its type column defines valid values.
"""

import math
import os
import re
import traceback
from functools import cache

import pytest
from big_batch_of_views import step_of_16
from distributed_runs import run_distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from recipe_runs import DINO, DPO, KD, SFT, set_up, slow

from recipe_utils.settings.describe import settings_of, type_in_words
from recipe_utils.settings.keys import keys_of
from recipe_utils.settings.problems import ConfigError
from recipe_utils.settings.read import read_settings

RECIPES = (SFT, DPO, KD, DINO)
VALUES = ["hello", "False", 1.5, -1, 0, None, [], {}, 10**30]
MOST = {
    "seed": 2**32 - 1,
    "data_seed": 2**32 - 1,
    "process_group_timeout_seconds": 1e9,
    "mask_probability": 1.0,
    "ema_momentum": 1.0,
    "ema_momentum_end": 1.0,
}
PATHLESS = ("profiler", "dino_head", "ibot_head")
"""Keys of components without ``_component_``."""
settings_of = cache(settings_of)


def types_of(recipe):
    """Returns the types of keys in words, as errors and tables have them."""
    return {key: type_in_words(spec).split(" or ") for key, spec in keys_of(settings_of(recipe)).items()}


TYPES = {recipe: types_of(recipe) for recipe in RECIPES}
OWN = {
    recipe: [key for key in types if recipe == SFT or TYPES[SFT].get(key) != types[key]]
    for recipe, types in TYPES.items()
}
"""Keys of each recipe that are tested. Keys shared with the first recipe are read by the same code."""


def bounds_of(recipe, key):
    return [float(n) for text in TYPES[recipe][key] for n in re.findall(r">=? (\S+)", text)]


def values_for(recipe, key):
    """Returns values of every type, of which many are near the key's bounds."""
    near = [bound + step for bound in bounds_of(recipe, key) for step in (-1, 0, 1, -0.5, 0.5)]
    near += [most + step for most in (MOST.get(key, 2**31 - 1),) for step in (0, 1)]
    near += [int(value) for value in near if value == int(value)]
    numbers = st.sampled_from(near) | st.integers() | st.floats()
    words = st.sampled_from([part for text in TYPES[recipe][key] for part in text.split()])
    scalars = st.none() | st.booleans() | numbers | words | st.text("ab1: {}.?", max_size=4)
    return scalars | st.lists(scalars, max_size=2) | st.just({})


def is_documented(recipe, key, value):
    """Returns True if the type in words allows a value."""
    return any(fits(kind, value, key) for kind in TYPES[recipe][key])


def fits(words, value, key):
    kind, _, bound = words.partition(" > ")
    kind, _, least = kind.partition(" >= ")
    if kind.startswith("list of ") and isinstance(value, list):
        of_items = words.removeprefix("list of ")
        return "component" not in kind and all(fits(of_items, each, key) for each in value)
    if value is None:
        return kind == "null"
    if isinstance(value, str):
        return kind in ("str", "path", value)
    if value == {}:
        return key in PATHLESS or kind == "mapping"
    if isinstance(value, list):
        return False
    # pydantic compares with the options of a Literal, and False == 0.
    options = {str(value)} | ({str(bool(value)), str(int(value))} if value in (0, 1) else set())
    if isinstance(value, bool):
        return kind == "bool" or kind in options
    is_number = kind == "float" or (kind == "int" and isinstance(value, int))
    most = MOST.get(key, 2**31 - 1 if kind == "int" else math.inf)
    is_number &= value >= float(least or "-inf") and value > float(bound or "-inf")
    return (is_number and value <= most) or kind in options


def test_the_table_has_every_key_once():
    assert len(TYPES[SFT]) > 60
    assert {"batch_size", "microbatching", "clip_grad_norm", "optimizer"} <= TYPES[SFT].keys()
    assert "reference" in OWN[DPO]
    assert "kd_ratio" in OWN[KD]
    assert "ema_momentum" in OWN[DINO]


@pytest.fixture
def configs(tiny_config, tiny_dpo_config, tiny_kd_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where output_dir=hello goes
    text = {"_component_": "tiny.tiny_dataset", "num_samples": 4}
    pairs = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 4}
    images = {"_component_": "tiny.tiny_images", "num_images": 8}
    of_text = tiny_config(max_steps_per_epoch=1, dataset_val=text)
    return {
        SFT: of_text,
        DPO: tiny_dpo_config(max_steps_per_epoch=1, dataset_val=pairs),
        KD: tiny_kd_config(max_steps_per_epoch=1, dataset_val=text),
        DINO: step_of_16(
            tiny_config,
            optimizer=of_text["optimizer"],
            batch_size=8,
            global_batch_size=8,
            max_steps_per_epoch=1,
            dataset_val=images,
            knn_neighbors=3,
        ),
    }


def problems_of(recipe, config):
    try:
        read_settings(OmegaConf.create(config), settings_of(recipe))
    except ConfigError as error:
        return tuple(map(str, error.problems))
    return ()


@pytest.mark.parametrize("num_values", [4, slow(8)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_value_is_documented_or_refused_by_the_name_of_its_key(recipe, num_values, configs):
    for key in OWN[recipe]:

        @settings(max_examples=num_values, derandomize=True, database=None)
        @given(values_for(recipe, key), st.just(key))
        def check(value, key):
            problems = problems_of(recipe, {**configs[recipe], key: value})
            documented = is_documented(recipe, key, value)
            assert problems or documented, f"{key}={value!r} is accepted silently"
            for problem in problems:
                assert re.search(rf"\b{key}\b", problem), f"{key}={value!r}: {problem}"
            if not documented:
                assert len(problems) == 1 or isinstance(value, list), problems

        check()


def set_up_each(recipe, config, folder):
    """Returns errors that do not name their key, by key and value, for values that the settings accept."""
    os.chdir(folder)
    failed = {}
    for key in OWN[recipe]:
        for value in VALUES:
            changed = {**config, key: value}
            if problems_of(recipe, changed):
                continue
            try:
                with set_up(changed, recipe):
                    pass
            except ConfigError as error:
                if key not in str(error):
                    failed[key, str(value)] = str(error)
            except Exception:
                failed[key, str(value)] = traceback.format_exc()
    return failed


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_accepted_values_build_a_recipe_or_are_refused_by_their_key(recipe, configs, tmp_path):
    config = configs[recipe]
    (failed,) = run_distributed(set_up_each, 1, recipe, config, str(tmp_path), timeout_seconds=300)
    assert failed == {}
