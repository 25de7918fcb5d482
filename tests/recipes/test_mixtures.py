"""Texts, pairs and images are mixed alike on any layout."""

import pytest
from big_batch_of_views import step_of_16
from distributed_runs import run_distributed
from recipe_runs import DINO, DPO, KD, SFT, losses, run_recipe, slow

from recipe_utils.files import CheckpointError

DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 40, "weight": 0.75}
PAIRS = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 19, "weight": 3}
IMAGES = {"_component_": "tiny.tiny_images", "num_images": 9, "weight": 3, "name": "few"}
STEPS_OF_8 = {"batch_size": 2, "global_batch_size": 8, "gradient_accumulation_steps": ...}
SECOND = {
    "tiny_dataset": {"num_samples": 7, "seed": 1, "name": "small", "weight": 0.25},
    "tiny_pair_dataset": {"num_pairs": 5, "seed": 1, "name": "few", "weight": 1},
    "tiny_images": {"num_images": 40, "name": "many", "weight": 1},
}


def mixed(first):
    return [first, {**first, **SECOND[first["_component_"].removeprefix("tiny.")]}]


@pytest.mark.parametrize("recipe", [SFT, slow(DPO), slow(KD), slow(DINO)])
def test_each_kind_of_data_is_mixed_alike_on_one_and_two_ranks(recipe, tiny_config, tiny_dpo_config, tiny_kd_config):
    if recipe == DINO:
        config = step_of_16(tiny_config, dataset=mixed(IMAGES), batch_size=4, epochs=2)
    else:
        make = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config}[recipe]
        data = mixed(PAIRS if recipe == DPO else DATA)
        config = make(dataset=data, epochs=2, microbatching="packed", **STEPS_OF_8)
    config["dtype"] = "fp64"
    one, two = (losses(run_distributed(run_recipe, n, config, recipe)[0]) for n in (1, 2))
    assert len(one) == 2 * {DPO: 24 // 8, DINO: 49 // 16}.get(recipe, 47 // 8)
    assert two == pytest.approx(one, rel=1e-6)


def test_another_weight_is_refused_at_a_resume(tiny_config):
    config = tiny_config(dataset=mixed(DATA), save_every_n_steps=11, **STEPS_OF_8)
    assert len(run_recipe(config)) == 5
    resumed = {**config, "resume_from_checkpoint": True, "epochs": 2}
    resumed["dataset"][1]["weight"] = 0.5
    text = "weights.small.0=0.5: the checkpoint was saved with 0.25 .*resume_with_other_data=True"
    with pytest.raises(CheckpointError, match=text):
        run_recipe(resumed)
    assert len(run_recipe({**resumed, "resume_with_other_data": True})) == 5


def test_epochs_of_any_length(tiny_config, caplog):
    config = tiny_config(dataset=mixed(DATA), mixture={"samples_per_epoch": 100}, **STEPS_OF_8)
    assert len(run_recipe(config)) == 100 // 8
    rows = [message.split() for message in caplog.messages]
    assert ["small", "7", "25.0%", "3.43", "3.43"] in rows
    assert (
        "dataset: an epoch of the mixture is 12 whole update steps; 4 of 100 samples are left for the next one"
        in caplog.text
    )


def test_a_list_with_names_alone_is_concatenated(tiny_config):
    named = [{**DATA, "name": "large"}, {**DATA, "num_samples": 7, "seed": 1, "name": "small"}]
    named = [{key: value for key, value in each.items() if key != "weight"} for each in named]
    plain = [{key: value for key, value in each.items() if key != "name"} for each in named]
    assert losses(run_recipe(tiny_config(dataset=named))) == losses(run_recipe(tiny_config(dataset=plain)))
