"""Metrics files, loggers and plots of a training, and its best model."""

import json
import re
import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch
from big_batch_of_views import step_of_16
from distributed_runs import run_distributed
from recipe_runs import DINO, DPO, KD, POLICY, SFT, call_in_step, keep_messages, run_recipe, set_up, slow
from safetensors.torch import load_file

from recipe_utils.plot.__main__ import curve, panels_of, plot
from recipe_utils.training.log import read_metrics

TIMES = {"time", "data_wait_seconds", "tokens_per_second_per_gpu", "real_tokens_per_second_per_gpu"}
TIMES |= {"pairs_per_second_per_gpu", "teacher_seconds"}
VAL = {"dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 8, "seed": 5}, "run_val_every_n_steps": 2}


def without_times(lines):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def metrics_of(config):
    return without_times(read_metrics(Path(config["output_dir"], "logs", "metrics.jsonl")))


@pytest.mark.slow
@pytest.mark.parametrize("reads_late", [False, True])
def test_a_resumed_run_has_the_metrics_of_an_uninterrupted_one(reads_late, recipe_and_config):
    recipe, make = recipe_and_config
    changes = {"epochs": 2, "max_steps_per_epoch": 3, "save_every_n_steps": 2}
    if recipe != DPO:
        changes |= VAL
    config = make(**changes, weights_dtype="fp32")
    logged = without_times(run_recipe(config, recipe))
    expected = metrics_of(config)
    first = 1 if recipe == DPO else 0
    assert [line["step"] for line in expected] == [*range(first, 7)]
    assert [line["loss"] for line in expected if "loss" in line] == [m["loss"] for m in logged if "loss" in m]
    if recipe != DPO:
        assert expected[-1]["num_tokens_seen"] == sum(m.get("num_tokens", 0) for m in logged)
    if reads_late:  # as on an accelerator
        config["output_dir"] += "_late"
        assert without_times(run_recipe(config, recipe, reads_late)) == logged
        assert metrics_of(config) == expected
    Path(config["output_dir"], "step_6", "complete.json").unlink()  # as if killed in epoch 2
    run_recipe({**config, "resume_from_checkpoint": True}, recipe, reads_late)
    assert metrics_of(config) == expected


# ---- The best model --------------------------------------------------------------------------------

RISING = {
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.003},
    "dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 8, "seed": 6},
    "run_val_every_n_steps": 2,
}
"""The validation loss falls first, then rises."""


def weights(folder):
    (file,) = Path(folder).glob("model-*")
    return torch.load(file) if file.suffix == ".bin" else load_file(file)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_best_model_is_the_one_of_the_lowest_validation_loss(world_size, tiny_config):
    batch = {"global_batch_size": 4, "gradient_accumulation_steps": ...}
    config = tiny_config(**RISING, **batch, keep_best_checkpoint=True, export_every_n_steps=2)
    run_distributed(run_recipe, world_size, config)
    losses = {m["step"]: m["val_loss"] for m in metrics_of(config) if "val_loss" in m}
    best = min(losses, key=losses.get)
    assert 2 < best < 8, losses
    output_dir = Path(config["output_dir"])
    kept, expected = weights(output_dir / "best"), weights(output_dir / f"export_step_{best}")
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    last = weights(output_dir / "epoch_0")
    assert not all(torch.equal(kept[name], last[name]) for name in expected)


@pytest.mark.slow
def test_a_resumed_training_compares_with_the_best_before(tiny_config):
    """All validations after the resume are worse."""
    config = tiny_config(**RISING, keep_best_checkpoint=True, save_every_n_steps=6)
    run_recipe(config)
    losses = {m["step"]: m["val_loss"] for m in metrics_of(config) if "val_loss" in m}
    assert min(losses, key=losses.get) <= 6 < 8, losses
    Path(config["output_dir"], "step_8", "complete.json").unlink()
    best = Path(config["output_dir"], "best")
    before = best.stat().st_mtime_ns
    with keep_messages() as messages:
        run_recipe({**config, "resume_from_checkpoint": True})
    assert any("after update step 6" in text for text in messages)
    assert best.stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_run_without_epochs_left_names_the_key(tiny_config):
    config = tiny_config(epochs=2, max_steps_per_epoch=2, save_every_n_steps=1)
    with keep_messages() as messages, set_up(config) as made:
        call_in_step(made, 1, made.run.stop.set)
        made.train()
    assert any(text.endswith("; no model is exported yet") for text in messages)
    run_recipe(config)
    config["resume_from_checkpoint"] = True
    text = "All 2 epochs are complete: nothing is trained, validated or exported; set epochs=3 to train longer"
    for changes, is_complete in (({}, True), ({"epochs": 3}, False)):
        with keep_messages() as messages:
            assert (run_recipe({**config, **changes}) == []) is is_complete
        assert (text in messages) is is_complete


# ---- Early stopping ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "patience", "changes"),
    [
        (1, 5, {}),  # ends with an epoch
        (2, 2, {"microbatching": "packed", "max_tokens_per_microbatch": 64}),
        slow(2, 6, {"data_parallel_replicate_dim": 2}),  # in the second epoch
    ],
)
def test_a_training_ends_some_validations_after_the_best_and_resumes_bitwise(
    world_size, patience, changes, tiny_config
):
    """Update step 3 has the lowest loss."""
    often = {
        **RISING,
        "run_val_every_n_steps": 1,
        "keep_last_n_checkpoints": None,
        "epochs": 3,
        "save_every_n_steps": 2,
    }
    config = tiny_config(**often, global_batch_size=4, gradient_accumulation_steps=..., **changes)
    config["early_stopping_patience"] = patience
    folder = Path(config["output_dir"])

    def trained(**changes):
        with_changes = {**config, "resume_from_checkpoint": "auto", **changes}
        num_logged = len(run_distributed(run_recipe, world_size, with_changes)[0])
        (export,) = folder.glob("epoch_*") if last <= 8 else [folder / "epoch_1"]
        return num_logged, metrics_of(config), weights(export)

    last = 3 + patience
    whole = trained()
    assert [line["step"] for line in whole[1]] == [*range(last + 1)]
    # Killed before the export, between checkpoint and end, and after the end.
    for removed in ([last], [last, last - 1, last - 2], []):
        for step in removed:
            shutil.rmtree(folder / f"step_{step}", ignore_errors=True)
        num_logged, *resumed = trained()
        assert (num_logged > 0) is bool(removed)
        assert resumed[0] == whole[1]
        assert all(torch.equal(resumed[1][name], whole[2][name]) for name in whole[2])
    # More patience continues where it ended.
    if last < 8:
        assert [line["step"] for line in trained(early_stopping_patience=patience + 1)[1]] == [*range(last + 2)]


def test_an_improvement_below_the_threshold_is_none(tiny_config):
    """Validations of 4.345, 4.334 and 4.328."""
    config = tiny_config(**{**RISING, "run_val_every_n_steps": 1}, global_batch_size=4, gradient_accumulation_steps=...)
    with keep_messages() as messages:
        run_recipe({**config, "early_stopping_patience": 2, "early_stopping_threshold": 0.02})
    assert metrics_of(config)[-1]["step"] == 3
    assert "Ended early: 2 validations in a row were not better (early_stopping_patience=2)" in messages


# ---- torchtune's loggers ---------------------------------------------------------------------------


@pytest.mark.slow
def test_tensorboard_gets_the_metrics(tiny_config, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    component = "torchtune.training.metric_logging.TensorBoardLogger"
    logger = {"_component_": component, "log_dir": str(tmp_path / "tb"), "organize_logs": False}
    config = tiny_config(metric_logger=logger, **VAL)
    run_recipe(config)
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    for name in ("loss", "val_loss", "lr"):
        expected = {m["step"]: m[name] for m in metrics_of(config) if name in m}
        found = {e.step: e.tensor_proto.float_val[0] for e in events.Tensors(name)}
        assert found == pytest.approx(expected)


# ---- What one sees ---------------------------------------------------------------------------------

MAIN = {
    SFT: {"loss": "loss", "val_loss": "val"},
    DPO: {"rewards/accuracies": "accuracies", "rewards/margins": "margins", "val_loss": "val"},
    KD: {"teacher_agreement": "agreement", "val_loss": "val"},
    POLICY: {"mean_reward": "reward", "val_reward": "val"},
    DINO: {"loss": "loss", "knn_accuracy": "knn"},
}
"""Recipe -> its main metrics and their names in the progress bar."""
VALIDATED = {"run_val_every_n_steps": 1, "max_steps_per_epoch": 2}


@pytest.fixture
def config_with_validation(request, tmp_path):
    """Makes a config of a recipe with a validation after each of two update steps."""

    def make(recipe):
        kinds = {DPO: "tiny_dpo_config", KD: "tiny_kd_config"}
        config = request.getfixturevalue(kinds.get(recipe, "tiny_config"))
        if recipe == DINO:
            images = {"_component_": "tiny.tiny_images", "num_images": 31, "num_classes": 13}
            knn = {"dataset_knn": images, "dataset_val": {**images, "num_images": 21}, "knn_neighbors": 5}
            return step_of_16(config, batch_size=8, **knn, **VALIDATED)
        if recipe != POLICY:
            return config(dataset_val=config()["dataset"], **VALIDATED)
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(json.dumps({"prompt": "Why?", "target": 3}))
        sampler = {"_component_": "recipe_utils.policy.ModelSampler", "prompts": str(prompts)}
        sampler |= {"reward": "rewards.of_length", "max_new_tokens": 8}
        rounds = {"_component_": "recipe_utils.policy.rollout_dataset", "path": str(tmp_path / "rounds")}
        own = {"dataset": {**rounds, "groups_per_round": 8}, "loss": {"_component_": "recipe_utils.policy.PolicyLoss"}}
        return config(**own, sampler=sampler, sampler_val=sampler, **VALIDATED)

    return make


@pytest.mark.parametrize("recipe", MAIN)
def test_main_metrics_of_an_objective_stand_in_bar_summary_and_plot(recipe, config_with_validation, capsys):
    config = config_with_validation(recipe)
    with keep_messages() as messages:
        run_recipe(config, recipe)
    bar, panels = capsys.readouterr().err, panels_of(dict.fromkeys(chain(*metrics_of(config))))
    for name, label in MAIN[recipe].items():
        assert sum(message.startswith(f"{name}: first ") for message in messages) == 1, (name, messages)
        assert re.search(rf"\| {label} -?\d", bar), (label, bar)
        assert sum(name in drawn for drawn in panels.values()) == 1, panels


def test_metrics_are_plotted_each_once(tmp_path):
    metrics = [
        {"step": i, "num_tokens_seen": 10 * i, "loss": 9.0 - i, "loss/a": 1.0, "my_term": 2.0} for i in (1, 2, 3)
    ]
    metrics[1] |= {"val_loss": 5.0, "loss": None, "val_loss/a": 1.0, "val_my_term": 1.0}
    assert curve(metrics, "loss", "num_tokens_seen") == [(10, 8.0), (30, 6.0)]
    assert curve(metrics, "val_loss", "step") == [(2, 5.0)]
    assert panels_of(dict.fromkeys(chain(*metrics))) == {
        "loss [nats]": ["loss", "val_loss"],
        "loss of datasets [nats]": ["loss/a", "val_loss/a"],
        "my_term": ["my_term", "val_my_term"],
    }
    for over in ("step", "num_tokens_seen"):
        plot({"a": metrics, "b": metrics[:1]}, tmp_path / "m.png", over)
        assert (tmp_path / "m.png").read_bytes()[1:4] == b"PNG"
