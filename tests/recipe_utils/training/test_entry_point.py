"""Overrides of the command line that torchtune's parser cannot merge."""

import pytest
from omegaconf import OmegaConf

from recipe_utils.settings.problems import ConfigError
from recipe_utils.training.entry_point import with_entries

MIXTURE = {"dataset": [{"name": "a", "weight": 1.0}, {"name": "b"}], "lr": {"0": 1}, "seed": 1}


def test_a_key_of_an_entry_of_a_list_is_set_with_its_type():
    cfg = OmegaConf.create(MIXTURE)
    words = ["dataset.0.weight=0.4", "dataset.1.loss_weight=2", "dataset.1.subset=null", "lr.0=2"]
    changed = OmegaConf.to_container(with_entries(cfg, words))
    assert changed["dataset"] == [{"name": "a", "weight": 0.4}, {"name": "b", "loss_weight": 2, "subset": None}]
    assert changed["lr"] == {"0": 2}
    assert cfg == MIXTURE


def test_an_entry_that_the_config_does_not_have_is_refused():
    with pytest.raises(ConfigError) as error:
        with_entries(OmegaConf.create(MIXTURE), ["dataset.2.weight=1", "seed.0=1", "none.0.x=1"])
    text = str(error.value)
    assert "dataset.2.weight=1: dataset has 2 entries, from dataset.0" in text
    assert "seed.0=1: seed is no list in the config" in text
    assert "none.0.x=1: none is no list in the config" in text
