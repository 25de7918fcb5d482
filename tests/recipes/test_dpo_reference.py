"""The reference's log-probabilities are the same live, offloaded, and cached."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from recipe_runs import (
    DPO,
    ListLogger,
    exported_model,
    losses,
    run_recipe,
    run_recipe_keeping_warnings,
    set_up,
    slow,
    with_adapters,
    writing_to,
)

from recipe_utils.files import CheckpointError
from recipe_utils.models.frozen import FrozenModel
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.reference import cache
from recipe_utils.reference.source import OnePass
from recipe_utils.settings.problems import ConfigError

PAIRS = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 19, "kind": "alike_beginnings"}


@pytest.fixture
def cached_config(tiny_dpo_config, tmp_path):
    """Makes configs of trainings that share a cache, each with an output folder of its own."""
    made = iter(range(100))

    def make(**changes):
        config = tiny_dpo_config(
            **{
                "dataset": PAIRS,
                "dtype": "fp64",
                "reference": "cached",
                "reference_cache_dir": str(tmp_path / "cache"),
                "epochs": 2,
                **changes,
            }
        )
        config = writing_to(tmp_path / f"out_{next(made)}", config)
        return {key: value for key, value in config.items() if value is not ...}

    return make


LIVE = {"reference": "live", "reference_cache_dir": ...}


def num_pairs_in(config):
    """Returns the number of pairs in all files of the cache."""
    files = Path(config["reference_cache_dir"]).iterdir()
    return sum(len(np.load(file)["numbers"]) / 2 for file in files)


def losses_of(config):
    return losses(run_recipe(config, DPO))


def losses_of_all(configs):
    return [losses_of(config) for config in configs]


@pytest.mark.parametrize("plan", ["packed", slow("least_padding")])
def test_where_the_policy_is_the_reference_rewards_are_exactly_zero(plan, tiny_dpo_config):
    config = tiny_dpo_config(ref_checkpointer=None, microbatching=plan, gradient_accumulation_steps=4)
    first, *_, last = run_recipe(config, DPO)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-12)
    for name in ("chosen", "rejected", "margins", "accuracies"):
        assert first[f"rewards/{name}"] == 0
        assert last[f"rewards/{name}"] != 0


PP_2 = {"pipeline_parallel_dim": 2}


@pytest.mark.parametrize(
    ("plan", "world_size", "dims"),
    [
        ("packed", 1, {}),
        ("in_order", 2, PP_2),
        slow("in_order", 1, {}),
        slow("least_padding", 2, {}),
        slow("packed", 4, PP_2),
    ],
)
def test_where_it_comes_from_changes_nothing(plan, world_size, dims, cached_config):
    sources = (LIVE, {**LIVE, "reference": "offload"}, {}, {})
    configs = [cached_config(microbatching=plan, **dims, **source) for source in sources]
    live, offload, computing, finding = run_distributed(losses_of_all, world_size, configs)[0]
    num_steps = math.ceil(19 / (4 * world_size // dims.get("pipeline_parallel_dim", 1)))
    assert len(live) == 2 * num_steps
    assert offload == live
    assert exported_model(configs[1]).read_bytes() == exported_model(configs[0]).read_bytes()
    assert computing == finding
    assert exported_model(configs[2]).read_bytes() == exported_model(configs[3]).read_bytes()
    # In the pass before training, a pair has other pairs in its microbatch, which last digits depend on.
    assert computing == pytest.approx(live, rel=1e-6)
    # The third has computed what the fourth found.
    assert num_pairs_in(configs[2]) == 19


@pytest.mark.parametrize("num_steps", [1, 3])
def test_the_pass_before_training_computes_no_more_than_training_uses(num_steps, cached_config):
    config = cached_config(max_steps_per_epoch=num_steps, epochs=1, microbatching="packed")
    losses_of(config)
    assert num_pairs_in(config) == 4 * num_steps


@pytest.mark.slow
def test_the_cache_is_used_again_unless_the_log_probabilities_depend_on_a_change(cached_config):
    losses_of(cached_config(microbatching="packed"))
    for change in (
        {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.5}},
        {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.7}},
        {"batch_size": 3, "max_tokens_per_microbatch": 150},
        {"shuffle": False, "seed": 5, "sft_loss_weight": 0.5},
    ):
        losses_of(cached_config(microbatching="packed", **change))
        assert num_pairs_in(cached_config()) == 19, change
    run_distributed(losses_of, 2, cached_config(microbatching="packed"))
    known = num_pairs_in(cached_config())
    assert known == 19

    other_weights = cached_config()["ref_checkpointer"] | {"checkpoint_files": ["weights.pt"]}
    for num_computed, change in (
        (1, {"dataset": {**PAIRS, "num_pairs": 20}}),
        (19, {"dataset": {**PAIRS, "kind": "multi_turn"}}),
        (19, {"prefix_sharing": False}),
        (19, {"microbatching": "in_order"}),
        (19, {"dtype": "fp32"}),
        (19, {"ref_checkpointer": other_weights}),
        (19, {"model": {**tiny.MODEL, "rope_base": 10_000}}),
    ):
        config = cached_config(**{"microbatching": "packed", **change})
        live = cached_config(**{"microbatching": "packed", **change, **LIVE})
        assert losses_of(config) == pytest.approx(losses_of(live), rel=1e-5)
        known += num_computed
        assert num_pairs_in(config) == known, change


class _KilledError(Exception):
    pass


def test_a_killed_pass_before_training_resumes_with_the_same_rows(cached_config, monkeypatch):
    whole = losses_of(cached_config(reference_cache_dir=str(cached_config()["output_dir"])))
    computed = []
    outputs = FrozenModel.outputs

    def killed_in_its_third_step(self, microbatches):
        computed.append(len(microbatches))
        if len(computed) == 3:
            raise _KilledError
        return outputs(self, microbatches)

    monkeypatch.setattr(FrozenModel, "outputs", killed_in_its_third_step)
    monkeypatch.setattr(cache, "_SECONDS_BETWEEN_WRITES", 0.0)
    with pytest.raises(_KilledError):
        losses_of(cached_config())
    assert losses_of(cached_config()) == whole
    assert len(computed) == 3 + 5 - 2
    assert num_pairs_in(cached_config()) == 19


def test_a_pair_that_the_pass_before_training_did_not_see_is_named(cached_config, monkeypatch):
    monkeypatch.setattr(OnePass, "num_steps", lambda self, epoch: 1)
    with pytest.raises(CheckpointError, match=r"reference_cache_dir=.*: pair \d+ of dataset is not in"):
        losses_of(cached_config())


def test_a_model_with_a_cached_reference_is_alone_on_the_device(cached_config):
    for _ in range(2):
        with set_up(cached_config(), DPO) as training:
            assert training.attached.__self__._model is None


def test_a_resumed_training_has_the_same_reference(tiny_dpo_config):
    config = tiny_dpo_config(save_every_n_steps=2, epochs=1)
    losses_of(config)
    other = {**config["ref_checkpointer"], "checkpoint_files": ["weights.pt"]}
    with pytest.raises(CheckpointError, match=r"^ref_checkpointer: .*other frozen weights"):
        run_recipe({**config, "ref_checkpointer": other, "resume_from_checkpoint": True, "epochs": 2}, DPO)


@pytest.mark.parametrize(
    ("world_size", "use_dora", "reference"),
    [(1, True, "live"), (2, False, "cached"), slow(2, True, "offload"), slow(1, False, "live")],
)
def test_the_reference_of_given_adapters_is_what_training_starts_from(
    world_size, use_dora, reference, tiny_dpo_config, tmp_path
):
    config = tiny_dpo_config(
        model=tiny.adapted(tiny.DEEP_MODEL, use_dora=use_dora),
        reference=reference,
        dtype="fp64",
        save_every_n_steps=2,
        keep_last_n_checkpoints=9,
        optimizer={"_component_": "torch.optim.SGD", "lr": 0.5},
    )
    config = with_adapters(config, tmp_path)
    uninterrupted = run_distributed(run_recipe, world_size, config, DPO)[0]
    assert uninterrupted[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert uninterrupted[1]["loss"] != pytest.approx(math.log(2), abs=1e-4)
    shutil.copytree(Path(config["output_dir"], "step_2"), tmp_path / "resumed" / "step_2")
    resumed = resuming_in(tmp_path / "resumed", config)
    again = run_distributed(run_recipe, world_size, resumed, DPO)[0]
    assert losses(again) == losses(uninterrupted)[2:]
    resumed["checkpointer"]["adapter_checkpoint"] = None
    error = run_distributed(run_recipe, world_size, resumed, DPO, expect_failures=True)[0]
    assert "checkpointer.adapter_checkpoint=None: the checkpoint was saved with " in error


def test_a_reference_that_does_not_fit_is_named(tiny_dpo_config):
    config = tiny_dpo_config()
    wrong = {**config["ref_checkpointer"], "checkpoint_files": ["ref_deep.pt"]}
    for reference in ("live", "offload", "cached"):
        with pytest.raises(ConfigError, match="ref_checkpointer: the checkpoint does not fit"):
            run_recipe({**config, "ref_checkpointer": wrong, "reference": reference}, DPO)


def test_log_probabilities_that_are_not_finite_name_the_pair(tiny_dpo_config, tmp_path):
    weights = tiny.tiny_model().state_dict()
    weights["norm.scale"] *= float("nan")
    torch.save(weights, tmp_path / "nan.pt")
    config = tiny_dpo_config()
    config["ref_checkpointer"] |= {"checkpoint_dir": str(tmp_path), "checkpoint_files": ["nan.pt"]}
    with pytest.raises(NonfiniteError, match=r"pair \d+ of dataset: the reference's log-prob.*NaN"):
        run_recipe(config, DPO)


def test_a_loss_without_reference_builds_none(tiny_dpo_config):
    config = tiny_dpo_config(loss={"_component_": "recipe_utils.preference.SimPOLoss"}, reference="offload")
    config["ref_checkpointer"]["checkpoint_files"] = ["ref_deep.pt"]  # never read
    logged, warnings = run_recipe_keeping_warnings(config, DPO)
    assert len(logged) == len(ListLogger.logged)
    assert "reference=offload: not used, because the loss needs none" in warnings
