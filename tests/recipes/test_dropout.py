"""Dropout by sample and position: any layout and any resume has the losses of one process."""

import shutil

import numpy as np
import pytest
import tiny
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from recipe_runs import (
    DPO,
    KD,
    STEP_OF_8,
    losses,
    run_compiled_recipe,
    run_recipe,
    run_recipes,
    slow,
    writing_to,
)
from tiny_transformers import save_tiny

from recipe_utils.data.text import collate

LORA = tiny.adapted(tiny.DEEP_MODEL, lora_dropout=0.3)
SGD = {"_component_": "torch.optim.SGD", "lr": 1.0}
PACKED = {"microbatching": "packed"}
RECOMPUTED = {**PACKED, "enable_activation_checkpointing": True}
EVERY_SECOND = {"ac_mode": "selective", "ac_option": 2}
SPANNING = {**PACKED, "batch_size": 1, "max_tokens_per_microbatch": 12, "max_ranks_per_row": 2}
PP_2 = {"pipeline_parallel_dim": 2}
LAYOUTS = {  # ranks, and keys of configs
    "1": (1, [RECOMPUTED]),
    "1, others": (1, [PACKED, EVERY_SECOND, {"num_workers": 2}, {"batch_size": 8}]),
    "2": (2, [PACKED, {"batch_size": 1}, SPANNING]),
    "4": (4, [{**RECOMPUTED, "data_parallel_replicate_dim": 2, "batch_size": 1}]),
    "pp-2": (2, [PP_2, {**PP_2, **EVERY_SECOND}, {**PP_2, **RECOMPUTED, "batch_size": 1}]),
}


def config_of(make, **changes):
    data = {"_component_": "tiny.tiny_dataset", "num_samples": 40}
    own = {"model": LORA, "dataset": data, "optimizer": SGD, **STEP_OF_8}
    return make(**{**own, **changes})


@pytest.fixture(scope="module")
def one_process(module_config):
    """Losses of padded rows on one rank, and those without dropout."""
    without = {**LORA, "lora_dropout": 0.0}
    configs = [config_of(module_config), config_of(module_config, model=without)]
    (curves,) = run_distributed(run_recipes, 1, configs)
    return [losses(curve) for curve in curves]


@pytest.mark.parametrize("layout", ["1", *map(slow, list(LAYOUTS)[1:])])
def test_losses_of_other_layouts_are_equal(layout, tiny_config, one_process):
    expected, without = one_process
    assert len(expected) == 5
    assert expected[2:] != pytest.approx(without[2:], rel=1e-3)
    world_size, changes = LAYOUTS[layout]
    configs = [config_of(tiny_config, **each) for each in changes]
    for logged in run_distributed(run_recipes, world_size, configs)[0]:
        assert losses(logged) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_compiled_layers_have_equal_losses(tiny_config, one_process):
    """The masks are part of the graphs, also of recomputed layers."""
    for changes in (PACKED, RECOMPUTED):
        (logged,) = run_distributed(run_compiled_recipe, 1, config_of(tiny_config, **changes))
        assert losses(logged) == pytest.approx(one_process[0], rel=1e-6)


def run_with_positions_in_rows(config):
    with pytest.MonkeyPatch.context() as patches:
        mixed = collate.mixed_sequence
        in_row = lambda keys, positions: mixed(keys, np.arange(len(keys)))  # noqa: E731
        patches.setattr(collate, "mixed_sequence", in_row)
        return run_recipe(config)


def test_masks_of_positions_in_rows_are_noticed(tiny_config, one_process):
    (logged,) = run_distributed(run_with_positions_in_rows, 1, config_of(tiny_config, **PACKED))
    assert losses(logged) != pytest.approx(one_process[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [DPO, KD])
def test_pairs_and_students_have_equal_losses(recipe, tiny_dpo_config, tiny_kd_config):
    """Both sides of a pair have the mask of their shared prefix; reference and teacher have none."""
    make = tiny_dpo_config if recipe == DPO else tiny_kd_config
    own = {"model": tiny.adapted(tiny.MODEL, lora_dropout=0.3), "optimizer": SGD, **STEP_OF_8}
    changes = [{}, RECOMPUTED, {**PACKED, "prefix_sharing": False} if recipe == DPO else PACKED]
    configs = [make(**own, **each) for each in changes]
    first, *others = run_distributed(run_recipes, 1, configs, recipe)[0]
    others += run_distributed(run_recipes, 2, [make(**own, **PACKED)], recipe)[0]
    for logged in others:
        assert losses(logged) == pytest.approx(losses(first), rel=1e-6)


@pytest.mark.slow
def test_a_resumed_training_draws_the_same_masks_on_other_ranks(tiny_config, tmp_path, one_process):
    config = config_of(tiny_config, save_every_n_steps=2, keep_last_n_checkpoints=9)
    run_distributed(run_recipe, 2, writing_to(tmp_path / "two", config))
    resumed = resuming_in(tmp_path / "one", {**config, **PACKED})
    shutil.copytree(tmp_path / "two" / "step_2", tmp_path / "one" / "step_2")
    (logged,) = run_distributed(run_recipe, 1, resumed)
    assert losses(logged) == pytest.approx(one_process[0][2:], rel=1e-6)


TREES = {"_component_": "tiny.tiny_tree_dataset", "num_samples": 40}
ALIKE = {"_component_": "tiny.tiny_dataset", "num_samples": 40, "num_common": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "changes"),
    [
        (TREES, [{**PACKED, "max_tokens_per_microbatch": number} for number in (300, 24)]),
        (ALIKE, [{}, {**PACKED, "max_tokens_per_microbatch": 128}]),
    ],
)
def test_sequences_with_one_beginning_have_equal_losses(data, changes, tiny_config):
    """Trees may be cut in any way. Samples that begin alike have separate masks, so they share nothing."""
    configs = [config_of(tiny_config, dataset=data, batch_size=1, **each) for each in changes]
    first, second = map(losses, run_distributed(run_recipes, 1, configs)[0])
    (on_two, *_) = run_distributed(run_recipe, 2, configs[1])
    assert second == pytest.approx(first, rel=1e-6)
    assert losses(on_two) == pytest.approx(first, rel=1e-6)


GPT2 = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "sizes"), [("gpt2", GPT2), ("mamba", {}), ("qwen3", {})])
def test_folders_of_transformers_have_equal_losses(model_type, sizes, tiny_config, tmp_path):
    """``nn.Dropout`` is in the model or in adapters, also if documents run one by one."""
    keys = save_tiny(tmp_path / model_type, model_type, **sizes)
    if not sizes:
        lora = "recipe_utils.model.transformers.adapters.lora_causal_lm"
        keys["model"] |= {"_component_": lora, "r": 4, "lora_alpha": 6, "lora_dropout": 0.3}
        keys["model"]["target_modules"] = ["in_proj" if model_type == "mamba" else "q_proj"]
    changes = [{}, PACKED, RECOMPUTED]
    configs = [config_of(tiny_config, **{**keys, **each}) for each in changes]
    first, *others = run_distributed(run_recipes, 1, configs)[0]
    others += run_distributed(run_recipes, 2, configs[1:2])[0]
    for logged in others:
        assert losses(logged) == pytest.approx(losses(first), rel=1e-6)
