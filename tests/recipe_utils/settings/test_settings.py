"""A config becomes frozen settings, or one error with all its problems."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from omegaconf import OmegaConf
from pydantic.dataclasses import dataclass

from recipe_utils.settings.components import Component, MadeWith
from recipe_utils.settings.describe import settings_of
from recipe_utils.settings.keys import STRICT, Count, FilePath, Positive, keys_of
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.settings.read import read_settings


@dataclass(frozen=True, config=STRICT)
class Oven:
    """Keys of a part."""

    num_trays: Count = 2
    """How many ``trays``
    it has."""
    heat: Positive | None = None
    """Above the air's."""
    mode: Literal["fan", "grill"] = "fan"
    is_lit: bool = False
    names: list[str] | None = None

    def problems(self):
        if self.mode == "grill" and self.num_trays > 1:
            yield Problem("num_trays", "mode=grill takes 1; set num_trays=1", self.num_trays)


def bake(dough: str, minutes: int, salt: float = 0.1, toppings: tuple[str, ...] = ()) -> str:
    """Component to which the recipe adds ``dough``."""


def open_oven(where: Path | None, note: str, path: str, extra: dict | None = None) -> None:
    """Has a path by its annotation, and one by its name."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Keys of a recipe."""

    oven: Oven
    bread: Annotated[dict[str, Any], MadeWith(num_positional=1)]
    """What is baked."""
    extra: Component | list[Component] | None = None
    guests: int = 0
    output_dir: FilePath | None = None
    text: str | None = None

    def problems(self):
        if self.guests > 4 * self.oven.num_trays:
            yield Problem("guests", f"{self.oven.num_trays} trays are too few; set num_trays", self.guests)


BREAD = {"_component_": "bakery.bake", "minutes": 30}


@pytest.fixture(autouse=True)
def components_are_found(monkeypatch):
    """Makes components importable: pytest imports this file under a name that is not."""
    monkeypatch.setitem(sys.modules, "bakery", sys.modules[__name__])


def config(**changes):
    return OmegaConf.create({"bread": BREAD, **changes})


def problems_of(**changes):
    with pytest.raises(ConfigError) as raised:
        read_settings(config(**changes), Settings)
    return [*map(str, raised.value.problems)]


def test_a_config_fills_the_settings_and_their_groups():
    settings = read_settings(config(num_trays=3, guests=5, heat=200), Settings)
    assert (settings.oven.num_trays, settings.oven.heat, settings.guests) == (3, 200, 5)
    assert settings.oven.mode == "fan"
    assert [*keys_of(Settings)][:2] == ["bread", "extra"]  # its own keys first
    assert keys_of(Settings)["num_trays"].description == "How many ``trays``\nit has."
    with pytest.raises(AttributeError):
        settings.guests = 6


def test_all_wrong_values_are_in_one_error():
    cfg = config(num_trays=0, heat="hot", mode="microwave", is_lit="False", guests=None, trays=1)
    with pytest.raises(ConfigError) as raised:
        read_settings(cfg, Settings)
    assert str(raised.value).splitlines() == [
        "6 problems in the config:",
        "  - trays: this recipe has no such key; did you mean num_trays?",
        "  - num_trays=0: it must be at least 1",
        "  - heat='hot': it must be float > 0 or null",
        "  - mode=microwave: unknown; set it to one of fan, grill",
        "  - is_lit='False': it must be True or False",
        "  - guests=null: it must be int; leave it out for 0",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_trays": 1.0}, "num_trays=1.0: it must be int >= 1"),
        ({"num_trays": True}, "num_trays=True: it must be int >= 1"),
        ({"num_trays": "3"}, "num_trays='3': it must be int >= 1"),
        ({"num_trays": 10**30}, "it must be at most 2147483647"),
        ({"heat": 0}, "heat=0: it must be above 0"),
        ({"heat": float("nan")}, "heat=nan: it must be above 0"),
        ({"names": "all"}, "names='all': it must be list of str or null"),
        ({"names": [1]}, "names=[1]: it must be list of str or null"),
        ({"bread": None}, "bread: it is missing; set it to a component (_component_: ...)"),
        ({"bread": "rye"}, "bread=rye: it must be a component (_component_: ...)"),
        ({"bread": {}}, "bread={}: it must be a component (_component_: ...)"),
        ({"extra": []}, "extra=[]: it is empty"),
        ({"extra": [{**BREAD, "dough": "rye"}, {"minutes": 3}]}, "extra.1={'minutes': 3}: it must be a component"),
        ({"guests": "${gone}"}, "guests: Interpolation key 'gone' not found"),
    ],
)
def test_a_wrong_value_is_reported_with_its_type(changes, expected):
    (text,) = problems_of(**changes)
    assert expected in text


def test_problems_between_keys_are_reported_once_each_key_is_valid():
    assert problems_of(mode="grill", guests=50) == [
        "num_trays=2: mode=grill takes 1; set num_trays=1",
        "guests=50: 2 trays are too few; set num_trays",
    ]
    assert problems_of(mode="grill", guests=50, heat=0) == ["heat=0: it must be above 0"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"minuts": 3}, "bread.minuts: bake has no such argument; did you mean minutes?"),
        ({"minutes": "long"}, "bread.minutes='long': bake takes int"),
        ({"minutes": True}, "bread.minutes=True: bake takes int"),
        ({"salt": "much"}, "bread.salt='much': bake takes float"),
        ({"toppings": "seeds"}, "bread.toppings='seeds': bake takes tuple[str, ...]"),
        ({"minutes": ...}, "bread.minutes: it is missing; bake needs it"),
        ({"_component_": "bakery.bakes"}, "bread._component_=bakery.bakes: Error loading"),
        ({"_component_": "bakery.BREAD"}, "bread._component_=bakery.BREAD: it is a dict"),
    ],
)
def test_arguments_of_a_component_must_match_its_signature(arguments, expected):
    bread = {key: value for key, value in {**BREAD, **arguments}.items() if value is not ...}
    assert any(expected in text for text in problems_of(bread=bread))


def test_arguments_that_match_a_signature_are_accepted():
    bread = {**BREAD, "salt": 1, "toppings": ["seeds", "oil"]}
    assert read_settings(config(bread=bread), Settings).bread == bread


def test_an_unknown_key_is_accepted_if_another_refers_to_it():
    assert "width: this recipe has no such key; take it out" in problems_of(width=3)
    for value in ("${width}", "${ width }"):
        assert read_settings(config(width=3, guests=value), Settings).guests == 3
    assert len(problems_of(width=3, names=["width"])) == 1


def test_a_key_without_effect_may_have_its_default_and_each_packed_dataset_has_a_packed_attention(tiny_config):
    packed = {"_component_": "tiny.tiny_dataset", "num_samples": 8, "packed": True}
    for changes in (
        {"sample_max_new_tokens": 64},
        *({"dataset": of, "packed_attention": "by_document"} for of in (packed, [packed])),
    ):
        read_settings(OmegaConf.create(tiny_config(**changes)), settings_of("full_finetune_update_step"))


def test_settings_are_found_by_a_recipe_s_name_or_path(tmp_path):
    assert settings_of("full_finetune_update_step").__name__ == "Settings"
    with pytest.raises(ValueError, match="no recipe of this name or path"):
        settings_of("full_finetune")
    path = tmp_path / "mine.py"
    path.write_text("Settings = 3")
    with pytest.raises(ValueError, match="it has no Settings"):
        settings_of(str(path))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("~/x", "HOME/x"),
        ("~", "HOME"),
        ("${root}/x", "HOME/runs/x"),
        ("/a/~/x", "/a/~/x"),
        ("x~", "x~"),
        ("~no_such_user/x", "~no_such_user/x"),
    ],
)
def test_a_tilde_at_the_start_of_a_path_is_the_home_directory(given, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/baker")
    cfg = config(output_dir=given, text="${output_dir}/l", root="~/runs", names=["${root}", "~"])
    settings = read_settings(cfg, Settings)
    assert cfg.output_dir == str(settings.output_dir) == expected.replace("HOME", "/home/baker")
    assert settings.text == f"{cfg.output_dir}/l"
    assert settings.oven.names == ["~/runs", "~"]


def test_arguments_that_are_paths_are_expanded_at_any_depth(monkeypatch):
    monkeypatch.setenv("HOME", "/home/baker")
    inner = {"checkpoint_files": ["~/b", "c"], "data_files": {"train": ["~/d"]}, "dir": "~/e"}
    oven = {"_component_": "bakery.open_oven", "where": "~/a", "note": "~/n", "path": "~/p"}
    cfg = config(extra=[{**oven, "extra": inner}])
    expected = str({**oven, "extra": inner}).replace("~/", "/home/baker/")
    expected = expected.replace("/home/baker/n", "~/n").replace("/home/baker/e", "~/e")
    read_settings(cfg, Settings)
    assert str(OmegaConf.to_container(cfg)["extra"][0]) == expected
