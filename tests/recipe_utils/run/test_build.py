"""Loaders of training and validation, in every recipe."""

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf
from recipe_runs import DPO, KD, SFT, recipe_class

PAIRS = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 8}
TEXTS = {"_component_": "tiny.tiny_dataset", "num_samples": 8}


@pytest.mark.parametrize("microbatching", ["in_order", "packed"])
@pytest.mark.parametrize("recipe", [SFT, DPO, KD])
def test_validation_has_a_batch_size_of_its_own(
    recipe, microbatching, tiny_config, tiny_dpo_config, tiny_kd_config
):
    make = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config}[recipe]
    counted = "pairs" if recipe == DPO else "samples"
    cfg = OmegaConf.create(
        make(
            dataset_val=PAIRS if recipe == DPO else TEXTS,
            run_val_every_n_steps=1,
            batch_size=2,
            batch_size_val=8,
            microbatching=microbatching,
        )
    )
    made = recipe_class(recipe=recipe)(cfg)
    try:
        made.setup(cfg)
        with made.val_loader.epoch(0) as steps:
            (step,) = list(steps)
        assert len(step.microbatches) == 1, counted
    finally:
        dist.destroy_process_group()
