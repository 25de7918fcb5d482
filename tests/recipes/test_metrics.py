"""What a training leaves of its metrics, and the best of its models."""

import json
from pathlib import Path

import pytest
import torch
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import DPO, KD, SFT, keep_messages, recipe_class, run_recipe
from safetensors.torch import load_file

from recipe_utils.run.log import read_metrics
from recipe_utils.run.plot import PANELS, curve, plot

TIMES = {"time", "data_wait_seconds", "tokens_per_second_per_gpu", "real_tokens_per_second_per_gpu"}
TIMES |= {"pairs_per_second_per_gpu", "teacher_seconds"}
VAL = {
    "dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 8, "seed": 5},
    "run_val_every_n_steps": 2,
}


def metrics_of(config):
    path = Path(config["output_dir"], "logs", "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(path)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [SFT, DPO, KD])
def test_a_resumed_training_s_file_is_that_of_one_that_was_never_stopped(
    recipe, tiny_config, tiny_dpo_config, tiny_kd_config
):
    make = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config}[recipe]
    changes = {"epochs": 2, "max_steps_per_epoch": 3, "save_every_n_steps": 2}
    if recipe != DPO:
        changes |= VAL
    config = make(**changes)
    whole = run_recipe(config, recipe)
    expected = metrics_of(config)
    assert [line["step"] for line in expected] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in expected] == [m["loss"] for m in whole if "loss" in m]
    assert (
        expected[-1]["num_tokens_seen"] == sum(m.get("num_tokens", 0) for m in whole)
        or recipe == DPO
    )
    for path in Path(config["output_dir"]).glob("step_6"):
        (path / "complete.json").unlink()  # as if it had been killed in the second epoch
    run_recipe({**config, "resume_from_checkpoint": True}, recipe)
    assert metrics_of(config) == expected


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [SFT, DPO, KD])
def test_metrics_that_are_read_late_are_the_same_also_of_a_resumed_training(
    recipe, tiny_config, tiny_dpo_config, tiny_kd_config
):
    """As on a device that the host does not wait for."""
    make = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config}[recipe]
    changes = {"epochs": 2, "max_steps_per_epoch": 3, "save_every_n_steps": 2}
    if recipe != DPO:
        changes |= VAL
    config = make(**changes, weights_dtype="fp32")

    def without_times(lines):
        return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]

    expected = without_times(run_recipe(config, recipe)), metrics_of(config)
    late = {**config, "output_dir": f"{config['output_dir']}_late"}
    assert (without_times(run_recipe(late, recipe, True)), metrics_of(late)) == expected
    Path(late["output_dir"], "step_6", "complete.json").unlink()
    run_recipe({**late, "resume_from_checkpoint": True}, recipe, True)
    assert metrics_of(late) == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_late_metrics_are_written_with_every_rank_s_part(world_size, tiny_config):
    config = tiny_config(global_batch_size=4, gradient_accumulation_steps=..., log_every_n_steps=3)
    expected, late = (
        run_distributed(run_recipe, world_size, config, SFT, reads_late)[0]
        for reads_late in (False, True)
    )
    assert [m["step"] for m in late] == [3, 6]
    for name in ("loss", "grad_norm", "num_tokens"):
        assert [m[name] for m in late] == [m[name] for m in expected]


# ---- The best model --------------------------------------------------------------------------------

RISING = {
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.003},
    "dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 8, "seed": 6},
    "run_val_every_n_steps": 2,
}
"""The validation loss falls first and rises again."""


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
def test_a_resumed_training_knows_the_best_so_far(tiny_config):
    """Its own validations are all worse."""
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


def test_a_best_model_without_validation_is_refused(tiny_config):
    with pytest.raises(
        ValueError, match=r"keep_best_checkpoint=True: .* set run_val_every_n_steps"
    ):
        recipe_class()(OmegaConf.create(tiny_config(keep_best_checkpoint=True)))


# ---- At the end ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_finished_training_says_that_nothing_is_left(tiny_config):
    config = tiny_config(epochs=2, max_steps_per_epoch=2, save_every_n_steps=1)
    run_recipe(config)
    with keep_messages() as messages:
        assert run_recipe({**config, "resume_from_checkpoint": True}) == []
    assert "Nothing left: 2 of 2 epochs are done; set epochs=3 to train on" in messages
    with keep_messages() as messages:
        assert run_recipe({**config, "resume_from_checkpoint": True, "epochs": 3})
    assert not any("Nothing left" in text for text in messages)


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


def leveldb_records(log):
    """What is in a log of LevelDB's format: blocks of 32 KiB, in them parts with headers of 7 bytes.

    The first block is shorter by what was before it.
    """
    at, whole, num_before, full, last = 0, b"", 7, 1, 4
    while at + 7 <= len(log):
        left = -(at + num_before) % (1 << 15) or 1 << 15
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        whole += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (full, last):
            yield whole
            whole = b""


@pytest.mark.slow
def test_wandb_gets_the_metrics_without_a_network(tiny_config, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_SILENT", "WANDB_DISABLE_GIT", "WANDB_DISABLE_CODE", "WANDB__DISABLE_STATS"):
        monkeypatch.setenv(name, "true")
    logger = {
        "_component_": "torchtune.training.metric_logging.WandBLogger",
        "log_dir": str(tmp_path), "mode": "offline", "project": "tiny",
    }  # fmt: skip
    config = tiny_config(metric_logger=logger, **VAL)
    run_recipe(config)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = {}
    for data in leveldb_records(file.read_bytes()[7:]):  # behind the file's own mark
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
        if "loss" in items:
            found[json.loads(items["global_step"])] = json.loads(items["loss"])
    assert found == {m["step"]: m["loss"] for m in metrics_of(config)}


# ---- The picture -----------------------------------------------------------------------------------


def test_curves_are_drawn_of_what_was_logged(tmp_path):
    pytest.importorskip("matplotlib")
    metrics = [
        {"step": i, "num_tokens_seen": 10 * i, "loss": 9.0 - i, "lr": 0.1} for i in (1, 2, 3)
    ]
    metrics[1] |= {"val_loss": 5.0, "loss": None}
    assert curve(metrics, "loss", "num_tokens_seen") == ([10, 30], [8.0, 6.0])
    assert curve(metrics, "val_loss", "step") == ([2], [5.0])
    assert curve(metrics, "padding_fraction", "step") == ([], [])
    plot({"a": metrics, "b": metrics[:1]}, tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes()[1:4] == b"PNG"
    assert {over for _, over, _ in PANELS} == {"step", "num_tokens_seen"}
