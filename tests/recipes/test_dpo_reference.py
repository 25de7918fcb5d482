"""Where the reference's log-probabilities come from changes nothing: live, offloaded, cached, precomputed."""

import math
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import DPO, ListLogger, recipe_class, run_recipe, run_recipe_keeping_warnings
from safetensors.torch import load_file, save_file

from recipe_utils.files import CheckpointError
from recipe_utils.model.frozen import cache
from recipe_utils.settings.problems import ConfigError

PLANS = {
    "in_order": {"microbatching": "in_order"},
    "least_padding": {"microbatching": "least_padding"},
    "packed": {"microbatching": "packed"},
}
PAIRS = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 19, "kind": "alike_beginnings"}


@pytest.fixture
def cached_config(tiny_dpo_config, tmp_path):
    """Makes configs of trainings that share a cache, each with an output folder of its own."""
    made = iter(range(100))

    def make(**changes):
        config = tiny_dpo_config(
            **{
                "dataset": PAIRS,
                "reference": "cached",
                "reference_cache_dir": str(tmp_path / "cache"),
                "epochs": 2,
                **changes,
            },
        )
        out = str(tmp_path / f"out_{next(made)}")
        config["output_dir"] = config["checkpointer"]["output_dir"] = out
        return {key: value for key, value in config.items() if value is not ...}

    return make


LIVE = {"reference": "live", "reference_cache_dir": ...}


def files_of(config):
    return sorted(Path(config["reference_cache_dir"]).glob("*.safetensors"))


def num_pairs_in(files):
    return sum(len(load_file(file)["keys"]) for file in files)


def losses_of(config):
    return [metrics["loss"] for metrics in run_recipe(config, DPO)]


def losses_of_all(configs):
    return [losses_of(config) for config in configs]


def weights_after(config):
    folder = Path(config["output_dir"], f"epoch_{config['epochs'] - 1}")
    (file,) = folder.glob("*.bin")
    return file.read_bytes()


@pytest.mark.parametrize("plan", ["packed", pytest.param("least_padding", marks=pytest.mark.slow)])
def test_where_the_policy_is_the_reference_rewards_are_exactly_zero(plan, tiny_dpo_config):
    config = tiny_dpo_config(ref_checkpointer=None, **PLANS[plan], gradient_accumulation_steps=4)
    first, *_, last = run_recipe(config, DPO)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-12)
    for name in ("chosen", "rejected", "margins", "accuracies"):
        assert first[f"rewards/{name}"] == 0
        assert last[f"rewards/{name}"] != 0


@pytest.mark.parametrize("plan", ["packed", pytest.param("least_padding", marks=pytest.mark.slow)])
def test_sides_exchanged_negate_the_margins(plan, tiny_dpo_config):
    of_sides = []
    for swaps in (False, True):
        data = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 8, "swaps_sides": swaps}
        config = tiny_dpo_config(dataset=data, max_steps_per_epoch=1, **PLANS[plan])
        of_sides.append(run_recipe(config, DPO)[0])
    as_given, swapped = of_sides
    assert as_given["rewards/margins"] == pytest.approx(-swapped["rewards/margins"], abs=1e-5)
    assert as_given["rewards/chosen"] == pytest.approx(swapped["rewards/rejected"], abs=1e-5)


PP_2 = {"pipeline_parallel_dim": 2}


@pytest.mark.parametrize(
    ("plan", "world_size", "dims"),
    [
        ("packed", 1, {}),
        ("in_order", 2, PP_2),
        pytest.param("in_order", 1, {}, marks=pytest.mark.slow),
        pytest.param("least_padding", 2, {}, marks=pytest.mark.slow),
        pytest.param("packed", 2, {}, marks=pytest.mark.slow),
        pytest.param("packed", 4, PP_2, marks=pytest.mark.slow),
    ],
)
def test_where_it_comes_from_changes_nothing(plan, world_size, dims, cached_config):
    plan = {**PLANS[plan], **dims}
    ways = (LIVE, {**LIVE, "reference": "offload"}, {}, {}, {"precompute_reference": True})
    configs = [cached_config(**plan, **way) for way in ways]
    configs[-1]["reference_cache_dir"] += "_of_another_pass"
    live, offload, *cached = run_distributed(losses_of_all, world_size, configs)[0]
    num_steps = math.ceil(19 / (4 * world_size // dims.get("pipeline_parallel_dim", 1)))
    assert len(live) == 2 * num_steps
    assert offload == live
    assert weights_after(configs[1]) == weights_after(configs[0])
    computing, finding, precomputing = cached
    assert computing == finding
    assert weights_after(configs[2]) == weights_after(configs[3])
    # In the second epoch and in the pass before, a pair meets other pairs in its microbatch, which some
    # kernels' last digits depend on.
    assert computing[:num_steps] == live[:num_steps]
    assert computing == pytest.approx(live, rel=1e-5)
    assert precomputing == pytest.approx(live, rel=1e-5)
    # The third has computed what the fourth found; the pass before training is one of all pairs.
    for config in (configs[2], configs[4]):
        assert num_pairs_in(files_of(config)) == 19


@pytest.mark.parametrize("num_steps", [1, 3])
def test_the_pass_before_training_computes_no_more_than_training_uses(num_steps, cached_config):
    config = cached_config(
        precompute_reference=True, max_steps_per_epoch=num_steps, epochs=1, microbatching="packed"
    )
    losses_of(config)
    assert num_pairs_in(files_of(config)) == 4 * num_steps


@pytest.mark.slow
def test_what_it_does_not_depend_on_recomputes_nothing(cached_config):
    config = cached_config(microbatching="packed")
    losses_of(config)
    files = files_of(config)
    for change in (
        {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.5}},
        {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.7}},
        {"loss": {"_component_": "torchtune.rlhf.loss.RSOLoss"}},
        {"batch_size": 3, "max_tokens_per_microbatch": 150},
        {"shuffle": False},
        {"seed": 5},
        {"sft_loss_weight": 0.5},
    ):
        other = cached_config(microbatching="packed", **change)
        losses_of(other)
        assert files_of(other) == files, change
    run_distributed(losses_of, 2, cached_config(microbatching="packed"))
    assert files_of(config) == files


@pytest.mark.slow
def test_what_it_depends_on_is_computed_anew(cached_config):
    config = cached_config(microbatching="packed")
    losses_of(config)
    known = set(files_of(config))

    def computed_with(**changes):
        other = cached_config(**{"microbatching": "packed", **changes})
        if "checkpoint_files" in changes:
            files = other.pop("checkpoint_files")
            other["ref_checkpointer"] = {**other["ref_checkpointer"], "checkpoint_files": files}
        losses = losses_of(other)
        live = {key: value for key, value in other.items() if key != "reference_cache_dir"}
        assert losses == pytest.approx(losses_of({**live, "reference": "live"}), rel=1e-5)
        new = set(files_of(other)) - known
        known.update(new)
        return num_pairs_in(new)

    assert computed_with(dataset={**PAIRS, "num_pairs": 20}) == 1
    assert computed_with(dataset={**PAIRS, "kind": "multi_turn"}) == 19
    assert computed_with(prefix_sharing=False) == 19
    assert computed_with(microbatching="in_order") == 19
    assert computed_with(dtype="fp64") == 19
    assert computed_with(checkpoint_files=["weights.pt"]) == 19
    assert computed_with(model={**tiny.MODEL, "rope_base": 10_000}) == 19


@pytest.mark.parametrize(
    "damage", ["torn", *(pytest.param(d, marks=pytest.mark.slow) for d in ("half", "foreign"))]
)
def test_a_cache_that_is_not_whole_costs_time_and_nothing_else(damage, cached_config):
    config = cached_config(epochs=1)
    expected = losses_of(config)
    (file,) = files_of(config)
    if damage == "half":  # as after a training that was killed; both ranks lack some
        file.unlink()
        losses_of(cached_config(max_steps_per_epoch=2, epochs=1))
        assert num_pairs_in(files_of(config)) == 8
    elif damage == "torn":
        file.write_bytes(file.read_bytes()[:-20])
    else:
        save_file({"weights": torch.zeros(3)}, file)
    losses, warnings = run_recipe_keeping_warnings(cached_config(epochs=1), DPO)
    assert [metrics["loss"] for metrics in losses] == pytest.approx(expected, rel=1e-5)
    assert ("skipped, its outputs are computed again" in " ".join(warnings)) == (damage != "half")
    ours, theirs = run_distributed(losses_of_all, 2, [cached_config(), cached_config(**LIVE)])[0]
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_flipped_bit_is_named_before_it_is_trained_on(cached_config):
    losses_of(cached_config())
    (file,) = files_of(cached_config())
    log_probs = load_file(file)["values.log_probs"].numpy().tobytes()
    content = bytearray(file.read_bytes())
    content[content.index(log_probs) + 5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file.name}.*delete the file"):
        losses_of(cached_config())


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(cached_config, monkeypatch):
    expected = losses_of(cached_config(**LIVE))

    def on_a_full_disk(path, _):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(cache, "replace_with_tensors", on_a_full_disk)
    config = cached_config(save_every_n_steps=2)
    logged, warnings = run_recipe_keeping_warnings(config, DPO)
    assert [m["loss"] for m in logged] == pytest.approx(expected, rel=1e-5)
    assert any("reference_cache_dir: [Errno 28]" in text for text in warnings)
    assert files_of(config) == []


def test_a_model_whose_reference_is_all_known_is_alone_on_the_device(cached_config):
    losses_of(cached_config())
    cfg = OmegaConf.create(cached_config())
    training = recipe_class(recipe=DPO)(cfg)
    with training.run:
        training.setup(cfg)
        training.train()
    assert training.reference.outputs.model is None


def train_and_die_at(operation, config):
    """Kills this process right before its n-th file operation on the cache."""
    seen = iter(range(1000))

    def die(event, args):
        touches = any("cache" in str(arg) and "safetensors" in str(arg) for arg in args)
        if event in ("open", "os.rename") and touches and next(seen) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    return losses_of(config)


@pytest.mark.slow
def test_a_training_killed_while_it_writes_the_cache_goes_on_bitwise(cached_config, tmp_path):
    expected = cached_config(save_every_n_steps=2)
    losses = losses_of(expected)
    num_kills = 0
    for operation in range(6):
        shutil.rmtree(tmp_path / "cache")
        config = cached_config(save_every_n_steps=2)
        (end,) = run_distributed(train_and_die_at, 1, operation, config, expect_failures=True)
        num_kills += end == "rank 0 died of SIGKILL"
        resumed = losses_of({**config, "resume_from_checkpoint": "auto"})
        assert losses[-len(resumed) :] == resumed
        assert weights_after(config) == weights_after(expected)
        assert all(len(load_file(file)["keys"]) for file in files_of(config))
    assert num_kills >= 2


def test_a_resumed_training_has_the_same_reference(tiny_dpo_config):
    config = tiny_dpo_config(save_every_n_steps=2, epochs=1)
    losses_of(config)
    other = {**config["ref_checkpointer"], "checkpoint_files": ["weights.pt"]}
    with pytest.raises(CheckpointError, match=r"^ref_checkpointer: .*other frozen weights"):
        run_recipe(
            {**config, "ref_checkpointer": other, "resume_from_checkpoint": True, "epochs": 2}, DPO
        )


def test_a_reference_that_does_not_fit_is_named(tiny_dpo_config):
    config = tiny_dpo_config()
    wrong = {**config["ref_checkpointer"], "checkpoint_files": ["ref_deep.pt"]}
    for reference in ("live", "offload", "cached"):
        with pytest.raises(ConfigError, match="ref_checkpointer: the checkpoint has weights that"):
            run_recipe({**config, "ref_checkpointer": wrong, "reference": reference}, DPO)


def test_a_reference_that_says_nothing_finite_names_the_pair(tiny_dpo_config, tmp_path):
    weights = tiny.tiny_model().state_dict()
    weights["norm.scale"] *= float("nan")
    torch.save(weights, tmp_path / "nan.pt")
    config = tiny_dpo_config()
    config["ref_checkpointer"] |= {"checkpoint_dir": str(tmp_path), "checkpoint_files": ["nan.pt"]}
    with pytest.raises(ValueError, match=r"pair \d+ of dataset: the reference's log-prob.*nan"):
        run_recipe(config, DPO)


def test_a_loss_without_reference_builds_none(tiny_dpo_config):
    config = tiny_dpo_config(
        loss={"_component_": "recipe_utils.loss.preference.SimPOLoss"}, reference="offload"
    )
    config["ref_checkpointer"]["checkpoint_files"] = ["ref_deep.pt"]  # never read
    logged, warnings = run_recipe_keeping_warnings(config, DPO)
    assert len(logged) == len(ListLogger.logged)
    assert "reference=offload: not used, because the loss needs none" in warnings
