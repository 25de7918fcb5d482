"""Loaders of training and validation, in every recipe."""

import pytest
from omegaconf import OmegaConf
from recipe_runs import DPO, recipe_class

PAIRS = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 8}
TEXTS = {"_component_": "tiny.tiny_dataset", "num_samples": 8}


@pytest.mark.parametrize("microbatching", ["in_order", "packed"])
def test_validation_has_its_own_batch_size(microbatching, recipe_and_config):
    recipe, make = recipe_and_config
    config = make(
        dataset_val=PAIRS if recipe == DPO else TEXTS,
        run_val_every_n_steps=1,
        batch_size=2,
        batch_size_val=8,
        microbatching=microbatching,
    )
    cfg = OmegaConf.create(config)
    made = recipe_class(recipe=recipe)(cfg)
    made.setup(cfg)
    with made.val_loader.epoch(0) as steps:
        (step,) = list(steps)
    assert len(step.microbatches) == 1
