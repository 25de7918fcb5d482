"""Preference tuning through the recipe: curves, metrics, skipped pairs."""

from functools import partial

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from recipe_runs import (
    DPO,
    STEP_OF_8,
    run_recipe,
    run_recipe_keeping_warnings,
    run_recipes,
    run_stock_recipe,
    slow,
    with_adapters,
    writing_to,
)
from recipe_runs import tiny_dpo_config as tiny_dpo_config_of

PAIRS = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 38, "kind": "alike_beginnings"}
COMPARED = (
    "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "log_probs/chosen",
    "log_probs/rejected",
)  # fmt: skip


def run(config):
    return run_recipe(config, DPO)


def of(logged, *names):
    """Returns metrics of each update step; torchtune logs tensors."""
    return [[float(metrics[n]) for n in names] for metrics in logged if "loss" in metrics]


def close(found, expected, *names, **tolerance):
    for of_step, of_other in zip(of(found, *names), of(expected, *names), strict=True):
        assert of_step == pytest.approx(of_other, **tolerance)


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_metrics_on_even_steps_are_those_of_the_stock_recipe(world_size, tiny_dpo_config):
    even = {**PAIRS, "num_pairs": 32}
    config = tiny_dpo_config(
        dataset=even, dtype="fp64", batch_size=2, gradient_accumulation_steps=4 // world_size, clip_grad_norm=1.0
    )
    expected = run_distributed(run_stock_recipe, world_size, config, "full_dpo")[0]
    assert len(expected) == 4
    plans = [{}, {"microbatching": "packed"}, {"microbatching": "packed", "prefix_sharing": False}]
    configs = [{**config, **plan} for plan in plans]
    for logged in run_distributed(run_recipes, world_size, configs, DPO)[0]:
        close(logged, expected, *COMPARED, rel=1e-6, abs=1e-9)


def test_adapters_on_even_steps_are_those_of_the_stock_recipe(tiny_dpo_config, tmp_path):
    sizes = tiny.adapted(tiny.UNTIED_MODEL)
    config = tiny_dpo_config(
        model=sizes, dataset={**PAIRS, "num_pairs": 24}, gradient_accumulation_steps=4, dtype="fp64"
    )
    config["checkpointer"]["checkpoint_files"] = ["untied.pt"]
    config = with_adapters(config, tmp_path)
    given = config["checkpointer"]["adapter_checkpoint"]
    start = torch.load(given, weights_only=True)  # with B = 0, which torchtune's reference lacks, too
    torch.save({name: w * ("lora_b" not in name) for name, w in start.items()}, given)
    (expected,) = run_distributed(run_stock_recipe, 1, config, "lora_dpo")
    logged = run({**config, "microbatching": "packed"})
    close(logged, expected, "loss", rel=1e-6)


@pytest.fixture(scope="module")
def curve(weights_folder, tmp_path_factory):
    """Returns metrics of two epochs on one process, of 5 update steps, the last of each with 6 pairs."""
    config = config_of(partial(tiny_dpo_config_of, weights_folder))
    return run(writing_to(tmp_path_factory.mktemp("curve"), config))


def config_of(make, **changes):
    return make(**{"dataset": PAIRS, "epochs": 2, "dtype": "fp64", "sft_loss_weight": 0.2, **STEP_OF_8, **changes})


UNCHANGED = {
    "workers": (1, {"num_workers": 2, "microbatching": "packed"}),
    "in-backward": (1, {"optimizer_in_bwd": True, "batch_size": 8}),
    "small-chunks": (2, {"tokens_per_chunk": 3, "microbatching": "packed"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", UNCHANGED)
def test_what_must_not_change_the_curve_does_not(case, tiny_dpo_config, curve):
    world_size, changes = UNCHANGED[case]
    logged = run_distributed(run, world_size, config_of(tiny_dpo_config, **changes))[0]
    names = (*COMPARED, "sft_loss", "preference_loss", "num_pairs")
    close(logged, curve, *names, rel=1e-6, abs=1e-9)


def test_what_is_logged(tiny_dpo_config):
    config = config_of(tiny_dpo_config, epochs=1, sft_loss_weight=0.0, microbatching="packed")
    logged = run(config)
    assert set(logged[0]) == {
        "step", *COMPARED, "lr", "grad_norm", "num_pairs", "num_left_out", "tokens_per_second_per_gpu",
        "real_tokens_per_second_per_gpu", "padding_fraction", "shared_fraction", "data_wait_seconds",
    }  # fmt: skip
    assert [metrics["num_pairs"] for metrics in logged] == [8, 8, 8, 8, 6]
    for metrics in logged:
        assert metrics["padding_fraction"] == 0
        assert 0.1 < metrics["shared_fraction"] < 0.5
        margin = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        assert metrics["rewards/margins"] == pytest.approx(margin, abs=1e-9)
    for metrics in run(config_of(tiny_dpo_config, epochs=1)):
        total = metrics["preference_loss"] + 0.2 * metrics["sft_loss"]
        assert metrics["loss"] == pytest.approx(total, rel=1e-9)


def test_validation_has_the_same_metrics_on_any_number_of_ranks(tiny_dpo_config):
    held_out = {"dataset_val": {**PAIRS, "num_pairs": 7, "seed": 3}, "run_val_every_n_steps": 2}
    config = config_of(tiny_dpo_config, epochs=1, microbatching="packed", **held_out)
    on_one = [metrics for metrics in run(config) if "val_loss" in metrics]
    on_four = [m for m in run_distributed(run, 4, config)[0] if "val_loss" in m]
    names = [f"val_{name}" for name in (*COMPARED, "sft_loss", "preference_loss")]
    assert set(on_one[0]) == {"step", *names}
    for found, expected in zip(on_four, on_one, strict=True):
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9)


def test_in_a_held_out_step_metrics_are_of_all_pairs(tiny_dpo_config):
    """Validation runs on the first update step's data, before and after a step of learning rate 0."""
    data = {**PAIRS, "num_pairs": 8}
    config = config_of(
        tiny_dpo_config, epochs=1, dataset=data, dataset_val=data, run_val_every_n_steps=1,
        optimizer={"_component_": "torch.optim.SGD", "lr": 0.0},
    )  # fmt: skip
    before, trained, validated = run(config)
    assert (before["step"], validated["step"]) == (0, 1)
    for name in (*COMPARED, "sft_loss"):
        assert before[f"val_{name}"] == pytest.approx(trained[name], rel=1e-6, abs=1e-9)
        assert validated[f"val_{name}"] == pytest.approx(trained[name], rel=1e-6, abs=1e-9)


# ---- Skipped pairs -------------------------------------------------------------------------------

WITH_DEAD = {"_component_": "tiny.pairs_some_of_which_teach_nothing", "num_pairs": 24}


@pytest.mark.parametrize(("world_size", "microbatching"), [(1, "packed"), slow(2, "in_order"), slow(2, "packed")])
def test_pairs_without_targets_are_skipped_named_once_and_counted(world_size, microbatching, tiny_dpo_config):
    config = config_of(tiny_dpo_config, dataset=WITH_DEAD, microbatching=microbatching)
    ranks = run_distributed(run_recipe_keeping_warnings, world_size, config, DPO)
    logged, _ = ranks[0]
    assert sum(metrics["num_left_out"] for metrics in logged) == 2 * 8
    assert sum(metrics["num_pairs"] for metrics in logged) == 2 * 16
    named = [text for _, warnings in ranks for text in warnings if "(skipped)" in text]
    # Once on each rank that has it; two epochs deal them out anew.
    assert len({text.split(":")[0] for text in named}) == 8
    assert len(named) == 8 if world_size == 1 else len(named) <= 16
    assert any("its rejected side has no target (skipped)" in text for text in named)
    assert any("its sides are equal (skipped)" in text for text in named)

    # The others have the metrics that they have without those.
    in_order = {"microbatching": microbatching, "shuffle": False, "epochs": 1, "batch_size": 1}
    alone, among_dead = (
        config_of(tiny_dpo_config, dataset=data, global_batch_size=size, **in_order)
        for data, size in (({**WITH_DEAD, "only_live": True}, 16), (WITH_DEAD, 24))
    )
    close(run(among_dead), run(alone), *COMPARED, rel=1e-6, abs=1e-9)


def test_an_update_step_of_dead_pairs_is_skipped(tiny_dpo_config):
    dead_first = {**WITH_DEAD, "dead_first": True}
    config = config_of(tiny_dpo_config, dataset=dead_first, shuffle=False, epochs=1)
    for world_size in (1, 2):
        logged, warnings = run_distributed(run_recipe_keeping_warnings, world_size, config, DPO)[0]
        assert len(logged) == 2
        assert any("update step 1: it has no pairs" in text for text in warnings)
