"""Metrics files, loggers and plots of a training, and its best model."""

from pathlib import Path

import pytest
import torch
from distributed_runs import run_distributed
from recipe_runs import DPO, call_in_step, keep_messages, run_recipe, set_up
from safetensors.torch import load_file

from recipe_utils.plot.__main__ import curve, plot
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


def test_metrics_are_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    metrics = [{"step": i, "num_tokens_seen": 10 * i, "loss": 9.0 - i, "lr": 0.1} for i in (1, 2, 3)]
    metrics[1] |= {"val_loss": 5.0, "loss": None}
    assert curve(metrics, "loss", "num_tokens_seen") == [(10, 8.0), (30, 6.0)]
    assert curve(metrics, "val_loss", "step") == [(2, 5.0)]
    assert curve(metrics, "padding_fraction", "step") == []
    plot({"a": metrics, "b": metrics[:1]}, tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes()[1:4] == b"PNG"
