"""Mistakes that once changed a training silently, through the recipe."""

import json
import os
import re
import shutil
import zlib
from pathlib import Path

import pytest
import tiny
import torch
from checkpoint_runs import resuming_in
from recipe_runs import (
    DPO,
    KD,
    SFT,
    ListLogger,
    cosine,
    keep_messages,
    losses,
    run_recipe,
    run_recipe_keeping_warnings,
    set_up,
    slow,
)

from recipe_utils.checkpoint.export import ExportError
from recipe_utils.checkpoint.folder import MARKER
from recipe_utils.files import CheckpointError
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.settings.problems import ConfigError

ADAMW = {"_component_": "torch.optim.AdamW", "lr": 0.01}
DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 32}
SCHEDULE = cosine(2)


@pytest.fixture(scope="module")
def trained(module_config, tmp_path_factory):
    """Returns by presence of a schedule a config, its 8 losses and its checkpoint of update step 4."""
    found = {}
    for lr_scheduler in (None, SCHEDULE):
        config = module_config(
            optimizer=ADAMW, lr_scheduler=lr_scheduler, data_seed=3, save_every_n_steps=4, keep_last_n_checkpoints=None
        )
        whole = losses(run_recipe(config))
        checkpoint = tmp_path_factory.mktemp("trained") / "step_4"
        shutil.move(Path(config["output_dir"], "step_4"), checkpoint)
        shutil.rmtree(config["output_dir"])
        found[lr_scheduler is not None] = config, whole, checkpoint
    return found


@pytest.fixture
def resumed(trained, tmp_path):
    """Makes a changed config of a training that was stopped after update step 4."""

    def make(has_schedule=False, **changes):
        config, _, checkpoint = trained[has_schedule]
        shutil.copytree(checkpoint, tmp_path / "out" / "step_4", dirs_exist_ok=True)
        return {**resuming_in(tmp_path / "out", config), **changes}

    return make


# ---- Two runs in one folder -----------------------------------------------------------------------


def test_a_new_run_moves_checkpoints_of_an_earlier_one_and_resumes_from_its_own(tiny_config):
    first = tiny_config(save_every_n_steps=2, keep_last_n_checkpoints=None)
    run_recipe(first)
    out = Path(first["output_dir"])
    second = {**first, "optimizer": {**ADAMW, "lr": 0.05}, "max_steps_per_epoch": 4, "epochs": 2}
    whole, warnings = run_recipe_keeping_warnings(second)
    (moved,) = out.glob("before_*")
    expected = "checkpoints of an earlier run (step_2, step_4, step_6, step_8) are moved to"
    assert expected in " ".join(warnings)
    assert str(moved) in " ".join(warnings)
    assert {path.name for path in moved.iterdir()} == {"step_2", "step_4", "step_6", "step_8"}
    shutil.rmtree(out / "step_6")
    shutil.rmtree(out / "step_8")
    with keep_messages() as messages:
        assert losses(run_recipe({**second, "resume_from_checkpoint": True})) == losses(whole)[4:]
    states = [json.loads(path.read_text()) for path in out.glob("step_*/state.json")]
    (run_id,) = {state["run_id"] for state in states}
    assert f"run {run_id}" in " ".join(messages)


def test_a_run_that_is_refused_leaves_an_earlier_one_s_checkpoints_where_they_are(tiny_config):
    config = tiny_config(save_every_n_steps=4)
    run_recipe(config)
    left = sorted(path.name for path in Path(config["output_dir"]).iterdir())
    nothing = {"_component_": "tiny.tiny_dataset", "num_samples": 8, "num_without_targets": 8}
    with pytest.raises(ConfigError, match="can be trained on"):
        run_recipe({**config, "dataset": nothing})
    assert sorted(path.name for path in Path(config["output_dir"]).iterdir()) == left


# ---- Resuming with a changed config ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "has_schedule"),
    [
        ("weight_decay", 5.0, False),
        ("lr", 1e-5, False),
        ("lr", 1e-5, True),
        ("betas", [0.5, 0.6], True),
        ("eps", 0.1, False),
    ],
)
def test_changed_arguments_of_the_optimizer_are_those_of_the_config(key, value, has_schedule, trained, resumed):
    config = resumed(has_schedule, optimizer={**ADAMW, key: value})
    with keep_messages() as messages, set_up(config) as made:
        (group,) = made.stepper.optimizer.param_groups
        if key == "lr" and has_schedule:
            assert group["lr"] < group["initial_lr"] == value
        else:
            assert group[key] == (tuple(value) if isinstance(value, list) else value)
        made.train()
    before = ADAMW.get(key, "its default")
    assert any(m.startswith(f"optimizer.{key}: {before} in the checkpoint") for m in messages)
    assert losses(ListLogger.logged)[-4:] != trained[has_schedule][1][4:]


def test_unchanged_arguments_and_schedule_resume_bitwise(trained, resumed):
    with keep_messages() as messages:
        assert losses(run_recipe(resumed(True))) == trained[True][1][4:]
    assert not [message for message in messages if message.startswith("optimizer.")]


def test_a_schedule_may_begin_where_there_was_none(resumed):
    rates = [metrics["lr"] for metrics in run_recipe(resumed(lr_scheduler=SCHEDULE))]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 0.01


def linear(optimizer, **given):
    """Schedule of a user that takes whatever it is given."""
    factor = lambda step: 1 - step / given["num_training_steps"]  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, given["last_epoch"])


SCHEDULES = {
    "transformers.get_constant_schedule_with_warmup": ({"num_warmup_steps": 4}, lambda step: min(step / 4, 1)),
    "transformers.get_inverse_sqrt_schedule": ({"num_warmup_steps": 2}, lambda n: n / 2 if n < 2 else (2 / n) ** 0.5),
    "transformers.get_constant_schedule": ({}, lambda step: 1),
    "tiny.linear": ({}, lambda step: 1 - step / 8),
}


@pytest.mark.parametrize("path", SCHEDULES)
def test_a_schedule_gets_the_steps_of_the_training_if_it_takes_them(path, tiny_config, monkeypatch):
    monkeypatch.setattr(tiny, "linear", linear, raising=False)
    given, factor = SCHEDULES[path]
    config = tiny_config(optimizer=ADAMW, lr_scheduler={"_component_": path, **given}, save_every_n_steps=5)
    expected = pytest.approx([0.01 * factor(step) for step in range(8)])
    assert [metrics["lr"] for metrics in run_recipe(config)] == expected
    shutil.rmtree(Path(config["output_dir"], "step_8"))
    resumed = run_recipe({**config, "resume_from_checkpoint": True})
    assert [metrics["lr"] for metrics in resumed] == pytest.approx(expected.expected[5:])


def test_without_its_schedule_a_training_has_the_rate_of_the_config(resumed):
    """The checkpoint's rate is that of the schedule's last update step, near 0."""
    logged = run_recipe({**resumed(True), "lr_scheduler": None})
    assert [metrics["lr"] for metrics in logged] == [0.01] * 4


def test_another_model_of_equal_shapes_is_refused_with_both_values(trained, resumed):
    model = {**tiny.MODEL, "rope_base": 10_000, "num_heads": 8, "num_kv_heads": 4}
    with pytest.raises(CheckpointError) as error:
        run_recipe(resumed(model=model))
    for expected in (
        "model.num_heads=8: the checkpoint was saved with 4",
        "model.rope_base=10000: the checkpoint was saved with None",
        "resume_with_other_model=True",
    ):
        assert expected in str(error.value)
    model = {**tiny.MODEL, "rope_base": 10_000}
    logged = run_recipe(resumed(model=model, resume_with_other_model=True))
    assert losses(logged) != trained[False][1][4:]


@pytest.mark.parametrize("seed", [None, 3])
def test_without_a_seed_a_resumed_training_has_the_seed_of_the_checkpoint(seed, tiny_config, tmp_path):
    model = tiny.adapted(tiny.MODEL, lora_dropout=0.5)
    config = tiny_config(model=model, seed=seed, save_every_n_steps=7)
    uninterrupted = losses(run_recipe(config))
    shutil.copytree(Path(config["output_dir"], "step_7"), tmp_path / "resumed" / "step_7")
    resumed = {**resuming_in(tmp_path / "resumed", config), "seed": None}
    assert losses(run_recipe(resumed)) == uninterrupted[7:]
    shutil.rmtree(tmp_path / "resumed" / "step_8", ignore_errors=True)
    assert losses(run_recipe({**resumed, "seed": 4})) != uninterrupted[7:]


def test_a_file_that_is_edited_in_place_is_noticed(tiny_config, tmp_path):
    samples = tiny.make_samples(16)
    for name in ("a", "b"):
        Path(tmp_path, name).write_text(json.dumps(samples))
    component = {"_component_": "tiny.file_dataset"}
    data = [{**component, "path": str(tmp_path / name), "name": name} for name in ("a", "b")]
    config = tiny_config(dataset=data, save_every_n_steps=3, max_steps_per_epoch=4)
    run_recipe(config)
    samples[5]["labels"][-1] += 1
    Path(tmp_path, "b").write_text(json.dumps(samples))
    config["resume_from_checkpoint"] = True
    words = "^content_hash.dataset.b=.*: the checkpoint was saved with .*; the file, tokenizer"
    with pytest.raises(CheckpointError, match=words):
        run_recipe(config)
    run_recipe({**config, "resume_with_other_data": True})


OTHER_DATA = {
    "num_samples=31: the checkpoint was saved with 32": {"dataset": {**DATA, "num_samples": 31}},
    "hash_of_samples=": {"dataset": {**DATA, "seed": 1}},
    "global_batch_size=8: the checkpoint was saved with 4": {"batch_size": 4},
    "data_seed=4: the checkpoint was saved with 3; shuffle=False: the": {"shuffle": False, "data_seed": 4},
}


@pytest.mark.parametrize("text", OTHER_DATA)
def test_other_data_and_another_order_are_refused_with_every_difference(text, resumed):
    with pytest.raises(CheckpointError, match=f"^(hash_of_samples.*; )?{text}.*resume_with_other_data=True"):
        run_recipe(resumed(**OTHER_DATA[text]))


def test_the_order_of_samples_follows_its_own_seed(tiny_config):
    def first_losses(**seeds):
        return losses(run_recipe(tiny_config(max_steps_per_epoch=2, **seeds)))

    same = first_losses(seed=0)
    assert first_losses(seed=0, data_seed=0) == first_losses(seed=1, data_seed=0) == same
    assert first_losses(seed=0, data_seed=1) != same


# ---- Gradients and weights that are not finite ----------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "changes"), [(SFT, {}), (SFT, {"save_every_n_steps": 3}), slow(DPO, {}), slow(KD, {})]
)
def test_gradients_that_are_not_finite_stop_before_anything_is_exported(
    recipe, changes, tiny_config, tiny_dpo_config, tiny_kd_config
):
    """They stop it also if no line is logged before the next checkpoint or the end."""
    make = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config}[recipe]
    config = make(log_every_n_steps=100, optimizer={**ADAMW, "lr": 1e30}, **changes)
    last = "the last 3 update steps up to 3 .*" if changes else ""
    with pytest.raises(NonfiniteError, match=f"{last}on_nonfinite=stop"):
        run_recipe(config, recipe)
    folders = " ".join(path.name for path in Path(config["output_dir"]).iterdir())
    assert "step_" in folders
    assert "epoch_" not in folders


def test_weights_that_are_not_finite_are_not_exported(tiny_config, tmp_path):
    weights = tiny.tiny_model().state_dict()
    weights["layers.0.attn.q_proj.weight"][0] = float("nan")
    folder = tmp_path / "given"
    folder.mkdir()
    torch.save(weights, folder / "nan.pt")
    config = tiny_config(on_nonfinite="skip", max_nonfinite_steps=1000)
    config["checkpointer"] |= {"checkpoint_dir": str(folder), "checkpoint_files": ["nan.pt"]}
    with pytest.raises(ExportError, match="epoch_0: not exported, 1 of 20 weights are NaN"):
        run_recipe(config)
    assert not Path(config["output_dir"], "epoch_0").exists()


# ---- Checkpoints with impossible values ------------------------------------------------------------


IMPOSSIBLE = {
    "samples of a float": (lambda c: c.update(samples_consumed=1e15), "samples_consumed=1000000000000000.0 is invalid"),
    "too many samples": (lambda c: c.update(samples_consumed=10**15), "has consumed 1000000000000000 samples of an epoch, the dataset has 32"),
    "epoch below zero": (lambda c: c.update(epoch=-2), "epoch=-2 is invalid"),
}  # fmt: skip


def change_state(config, change):
    folder = Path(config["output_dir"], "step_4")
    content = json.loads((folder / "state.json").read_text())
    change(content)
    raw = json.dumps(content).encode()
    (folder / "state.json").write_bytes(raw)
    marker = json.loads((folder / MARKER).read_text())
    marker["files"]["state.json"] = [len(raw), zlib.crc32(raw)]
    (folder / MARKER).write_text(json.dumps(marker))


def test_other_weights_of_targets_are_refused(resumed):
    with pytest.raises(CheckpointError, match=r"^other_content_hash=.*: the checkpoint was saved with"):
        run_recipe(resumed(dataset={**DATA, "has_weights": True}))


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_checkpoint_with_impossible_values_is_refused(case, resumed):
    """Its checksums are right."""
    change, text = IMPOSSIBLE[case]
    config = resumed()
    change_state(config, change)
    with pytest.raises((ConfigError, CheckpointError), match=re.escape(text)):
        run_recipe(config)


@pytest.mark.parametrize("kind", ["fifo", "device", "huge"])
def test_a_marker_that_is_no_file_is_no_checkpoint(kind, resumed):
    config = resumed()
    marker = Path(config["output_dir"], "step_4", MARKER)
    marker.unlink()
    if kind == "fifo":
        os.mkfifo(marker)
    elif kind == "device":
        marker.symlink_to("/dev/zero")
    else:
        with marker.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"can be used \(step_4: .*complete.json: it "):
        run_recipe(config)


def test_where_all_checkpoints_are_torn_auto_does_not_start_from_scratch(resumed):
    config = resumed(resume_from_checkpoint="auto")
    Path(config["output_dir"], "step_4", "state.json").unlink()
    Path(config["output_dir"], "step_2").mkdir()
    with pytest.raises(ConfigError, match=r"none of the checkpoints in .* 2 in all"):
        run_recipe(config)


# ---- What must not end a training -----------------------------------------------------------------


def test_a_logger_that_fails_is_warned_of_once_and_training_continues(tiny_config, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ListLogger, "log_dict", fail)
    monkeypatch.setattr(ListLogger, "close", fail)
    config = tiny_config()
    _, warnings = run_recipe_keeping_warnings(config)
    (warning,) = [text for text in warnings if "metric_logger" in text]
    assert warning.startswith("metric_logger: [Errno 28] No space left on device")
    assert Path(config["output_dir"], "epoch_0").is_dir()
