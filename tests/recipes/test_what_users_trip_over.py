"""What was wrong without a word, or died where it should not, through the recipe."""

import json
import os
import re
from pathlib import Path

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import (
    DPO,
    KD,
    SFT,
    FailingLogger,
    ListLogger,
    keep_messages,
    recipe_class,
    run_recipe,
    run_recipe_keeping_warnings,
)
from torchtune.config import instantiate
from torchtune.training import FullModelHFCheckpointer

from recipe_utils.checkpoint.export import ExportError
from recipe_utils.checkpoint.folder import MARKER, check_checksums
from recipe_utils.files import CheckpointError
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.settings.problems import ConfigError
from recipe_utils.tune.registry import config_path

RESUME = {"resume_from_checkpoint": True}
ADAMW = {"_component_": "torch.optim.AdamW", "lr": 0.01}
SCHEDULE = {
    "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "num_warmup_steps": 2,
}


def losses(logged):
    return [metrics["loss"] for metrics in logged if "loss" in metrics]


def stopped_after(num_steps, tiny_config, **changes):
    """A config whose training was killed, as it were, after so many of its 8 update steps."""
    config = tiny_config(save_every_n_steps=num_steps, keep_last_n_checkpoints=None, **changes)
    whole = run_recipe(config)
    for path in Path(config["output_dir"]).glob("step_*"):
        if path.name != f"step_{num_steps}":
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    return config, losses(whole)


# ---- Two runs in one folder -----------------------------------------------------------------------


def test_a_new_run_puts_aside_what_an_earlier_one_has_left_and_goes_on_from_its_own(tiny_config):
    first = tiny_config(save_every_n_steps=2, keep_last_n_checkpoints=None)
    run_recipe(first)
    second = {**first, "optimizer": {**ADAMW, "lr": 0.05}, "max_steps_per_epoch": 4}
    whole, warnings = run_recipe_keeping_warnings({**second, "epochs": 2})
    (aside,) = Path(first["output_dir"]).glob("before_*")
    told = "checkpoints of an earlier run (step_2, step_4, step_6, step_8) are moved to"
    assert told in " ".join(warnings)
    assert str(aside) in " ".join(warnings)
    assert {path.name for path in aside.iterdir()} == {"step_2", "step_4", "step_6", "step_8"}
    for name in ("step_6", "step_8"):
        for file in Path(first["output_dir"], name).iterdir():
            file.unlink()
        Path(first["output_dir"], name).rmdir()
    with keep_messages() as messages:
        resumed = run_recipe({**second, "epochs": 2, **RESUME})
    assert losses(resumed) == losses(whole)[4:]
    ids = {
        json.loads(path.read_text())["run_id"]
        for path in Path(first["output_dir"]).glob("step_*/state.json")
    }
    assert len(ids) == 1
    assert f"run {ids.pop()}" in " ".join(messages)


def test_a_run_that_is_refused_leaves_an_earlier_one_s_checkpoints_where_they_are(tiny_config):
    config = tiny_config(save_every_n_steps=4)
    run_recipe(config)
    left = sorted(path.name for path in Path(config["output_dir"]).iterdir())
    nothing = {"_component_": "tiny.tiny_dataset", "num_samples": 8, "num_without_targets": 8}
    with pytest.raises(ConfigError, match="can be trained on"):
        run_recipe({**config, "dataset": nothing})
    assert sorted(path.name for path in Path(config["output_dir"]).iterdir()) == left


# ---- Going on with other arguments --------------------------------------------------------------


@pytest.mark.parametrize("lr_scheduler", [None, SCHEDULE], ids=["constant", "schedule"])
@pytest.mark.parametrize(
    "change", [{"weight_decay": 5.0}, {"lr": 1e-5}, {"betas": [0.5, 0.6]}, {"eps": 0.1}], ids=str
)
def test_arguments_of_the_optimizer_that_changed_are_those_of_the_config(
    change, lr_scheduler, tiny_config
):
    config, whole = stopped_after(4, tiny_config, optimizer=ADAMW, lr_scheduler=lr_scheduler)
    changed = {**config, **RESUME, "optimizer": {**ADAMW, **change}}
    cfg = OmegaConf.create(changed)
    with keep_messages() as messages:
        made = recipe_class()(cfg)
        with made.run:
            made.setup(cfg)
            (key,), (value,) = change, change.values()
            (group,) = made.optimizer.param_groups
            if key == "lr" and lr_scheduler is not None:
                assert group["initial_lr"] == value
                assert group["lr"] < value
            else:
                assert group[key] == (tuple(value) if isinstance(value, list) else value)
            made.train()
    then = ADAMW.get(key, "its default")
    assert f"optimizer.{key}: {then} in the checkpoint, {value} from now on" in messages
    assert losses(ListLogger.logged)[-4:] != whole[4:]


@pytest.mark.parametrize("lr_scheduler", [None, SCHEDULE], ids=["constant", "schedule"])
def test_arguments_that_did_not_change_go_on_bitwise(lr_scheduler, tiny_config):
    config, whole = stopped_after(4, tiny_config, optimizer=ADAMW, lr_scheduler=lr_scheduler)
    with keep_messages() as messages:
        assert losses(run_recipe({**config, **RESUME})) == whole[4:]
    assert "from now on" not in " ".join(messages)


def test_a_schedule_may_begin_where_there_was_none(tiny_config):
    config, _ = stopped_after(4, tiny_config, optimizer=ADAMW)
    logged = run_recipe({**config, **RESUME, "lr_scheduler": SCHEDULE})
    rates = [metrics["lr"] for metrics in logged]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 0.01


def test_another_model_of_equal_shapes_is_refused_with_both_values(tiny_config):
    config, whole = stopped_after(4, tiny_config)
    other = {
        **config,
        **RESUME,
        "model": {**tiny.MODEL, "rope_base": 10_000, "num_heads": 8, "num_kv_heads": 4},
    }
    with pytest.raises(ConfigError) as error:
        run_config_errors(other)
    text = str(error.value)
    assert "model.num_heads=8: the checkpoint was saved with 4" in text
    assert "model.rope_base=10000: the checkpoint was saved with None" in text
    assert "resume_with_other_model=True" in text
    insisting = {**config, **RESUME, "model": {**tiny.MODEL, "rope_base": 10_000}}
    assert losses(run_recipe({**insisting, "resume_with_other_model": True})) != whole[4:]


def run_config_errors(config):
    """As the entry point sees them."""
    try:
        return run_recipe(config)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


# ---- Data that teach nothing, or not the same ------------------------------------------------------

NOTHING = {
    "all masked": {"num_samples": 8, "num_without_targets": 8},
    "one token": {"num_samples": 8, "replace": {str(i): {"tokens": [3], "labels": [3]} for i in range(8)}},
}  # fmt: skip


@pytest.mark.parametrize("key", ["dataset", "dataset_val"])
@pytest.mark.parametrize("case", NOTHING)
def test_data_without_a_target_are_refused_before_training(case, key, tiny_config):
    data = {"_component_": "tiny.tiny_dataset", **NOTHING[case]}
    config = tiny_config(
        **{"dataset_val": {**data, "num_samples": 8}, "run_val_every_n_steps": 1, key: data}
    )
    if key == "dataset":
        config["dataset_val"] = {"_component_": "tiny.tiny_dataset", "num_samples": 8}
    with pytest.raises(ConfigError, match=f"{key}: none of its 8 samples can be trained on"):
        run_recipe(config)
    assert not list(Path(config["output_dir"]).glob("epoch_*"))


def test_data_that_are_all_bad_are_refused_where_bad_ones_are_skipped(tiny_config):
    bad = {str(i): {"tokens": [3, 5000], "labels": [3, 3]} for i in range(4)}
    data = {"_component_": "tiny.tiny_dataset", "num_samples": 4, "replace": bad}
    with pytest.raises(ConfigError, match=r"dataset: none of its .* token 5000 is outside"):
        run_recipe(tiny_config(dataset=data, on_bad_sample="skip"))


def run_with_data_of_the_rank(config):
    rank = int(os.environ["RANK"])
    config["dataset"] = {**config["dataset"], "seed": rank}
    with pytest.raises(ConfigError) as error:
        run_recipe(config)
    return str(error.value)


def test_ranks_that_see_other_samples_are_named(tiny_config):
    for text in run_distributed(run_with_data_of_the_rank, 2, tiny_config()):
        assert "dataset: ranks 1 have other samples than rank 0" in text


# ---- Gradients and weights that are not finite ----------------------------------------------------


@pytest.mark.parametrize("recipe", [SFT, DPO, KD])
def test_gradients_that_are_not_finite_stop_before_anything_is_exported(
    recipe, tiny_config, tiny_dpo_config, tiny_kd_config
):
    """Also where no line of the log comes before the end."""
    make = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config}[recipe]
    config = make(log_every_n_steps=100, optimizer={**ADAMW, "lr": 1e30})
    with pytest.raises(NonfiniteError, match="on_nonfinite=stop"):
        run_recipe(config, recipe)
    folders = {path.name for path in Path(config["output_dir"]).iterdir()}
    assert not any(name.startswith("epoch_") for name in folders)
    assert any(name.startswith("step_") for name in folders)


def test_they_stop_a_training_before_its_next_checkpoint(tiny_config):
    config = tiny_config(
        log_every_n_steps=100, optimizer={**ADAMW, "lr": 1e30}, save_every_n_steps=3
    )
    with pytest.raises(NonfiniteError, match="of the last 3 update steps up to 3"):
        run_recipe(config)


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


def rewrite(config, step, name, change):
    """Changes a file of a checkpoint, with a right checksum."""
    import zlib

    folder = Path(config["output_dir"], f"step_{step}")
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    marker = json.loads((folder / MARKER).read_text())
    raw = (folder / name).read_bytes()
    marker["files"][name] = [len(raw), zlib.crc32(raw)]
    (folder / MARKER).write_text(json.dumps(marker))
    assert check_checksums(folder, [name]) is None


IMPOSSIBLE = {
    "samples of a float": ("state.json", lambda c: c.update(samples_consumed=1e15), "samples_consumed=1000000000000000.0 is invalid"),
    "too many samples": ("state.json", lambda c: c.update(samples_consumed=10**15), "has consumed 1000000000000000 samples of an epoch, the dataset has 32"),
    "samples below zero": ("state.json", lambda c: c.update(samples_consumed=-8), "samples_consumed=-8 is invalid"),
    "epoch below zero": ("state.json", lambda c: c.update(epoch=-2), "epoch=-2 is invalid"),
    "step of a string": ("state.json", lambda c: c.update(global_step="7"), "global_step='7' is invalid"),
    "an epoch and a half": ("state.json", lambda c: c.update(epoch=0.5), "epoch=0.5 is invalid"),
    "a part before its tensor": ("tensors.json", lambda c: c["model.norm.scale"]["parts"][0].update(offset=[-1]), "a part of model.norm.scale lies outside"),
    "a part behind its tensor": ("tensors.json", lambda c: c["model.norm.scale"]["parts"][0].update(offset=[10**6]), "a part of model.norm.scale lies outside"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_checkpoint_with_impossible_values_is_refused(case, tiny_config):
    name, change, text = IMPOSSIBLE[case]
    config, _ = stopped_after(4, tiny_config)
    rewrite(config, 4, name, change)
    with pytest.raises((ConfigError, CheckpointError), match=re.escape(text)):
        run_recipe({**config, **RESUME})


@pytest.mark.parametrize("kind", ["fifo", "device", "huge"])
def test_a_marker_that_is_no_file_is_no_checkpoint(kind, tiny_config):
    config, _ = stopped_after(4, tiny_config)
    marker = Path(config["output_dir"], "step_4", MARKER)
    marker.unlink()
    if kind == "fifo":
        os.mkfifo(marker)
    elif kind == "device":
        marker.symlink_to("/dev/zero")
    else:
        with marker.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(
        ConfigError, match=r"can be used \(step_4: .*complete.json: it .* starts from scratch"
    ):
        run_recipe({**config, **RESUME})


@pytest.mark.parametrize("resume", [True, "auto"])
def test_where_all_checkpoints_are_torn_it_does_not_start_anew_by_itself(resume, tiny_config):
    config, _ = stopped_after(4, tiny_config)
    Path(config["output_dir"], "step_4", "state.json").unlink()
    Path(config["output_dir"], "step_2").mkdir()
    with pytest.raises(ConfigError, match=r"none of the checkpoints in .* 2 in all"):
        run_recipe({**config, "resume_from_checkpoint": resume})


# ---- Samples of any kind ---------------------------------------------------------------------------

ODD_SAMPLES = {
    "nothing": None,
    "strings": {"tokens": ["a", "b"], "labels": ["a", "b"]},
    "too large": {"tokens": [1, 2**70], "labels": [1, 2**70]},
    "two dimensions": {"tokens": torch.ones(2, 2).long(), "labels": torch.ones(2, 2).long()},
    "bools": {"tokens": [True, False], "labels": [True, False]},
    "floats": {"tokens": [1.0, 2.0], "labels": [1.0, 2.0]},
}
DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 24}


def run_with_odd_samples(config, odd):
    """Each odd sample once, in the third update step of two samples on each rank."""
    samples = tiny.make_samples(24)
    samples[8 : 8 + len(odd)] = odd
    with tiny.samples_of_the_test(samples):
        return run_recipe_keeping_warnings(config)


@pytest.mark.parametrize("microbatching", ["in_order", "packed"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_samples_that_are_none_are_skipped_by_name(microbatching, world_size, tiny_config):
    config = tiny_config(
        dataset={"_component_": "tiny.samples_dataset"},
        shuffle=False,
        microbatching=microbatching,
        on_bad_sample="skip",
    )
    results = run_distributed(run_with_odd_samples, world_size, config, list(ODD_SAMPLES.values()))
    warnings = " ".join(text for _, texts in results for text in texts)
    for index in range(8, 8 + len(ODD_SAMPLES)):
        assert f"sample {index} of dataset: it" in warnings
    num_targets = [
        sum(label != tiny.IGNORE for label in sample["labels"][1:])
        for index, sample in enumerate(tiny.make_samples(24))
        if not 8 <= index < 8 + len(ODD_SAMPLES)
    ]
    assert sum(metrics["num_tokens"] for metrics in results[0][0]) == sum(num_targets)


@pytest.mark.parametrize("case", ODD_SAMPLES)
def test_a_sample_that_is_none_is_named_and_all_ranks_leave_together(case, tiny_config):
    config = tiny_config(dataset={"_component_": "tiny.samples_dataset"}, shuffle=False)
    good, bad = run_distributed(
        run_with_odd_samples, 2, config, [tiny.make_samples(9)[8], ODD_SAMPLES[case]],
        expect_failures=True, timeout_seconds=15,
    )  # fmt: skip
    assert "SampleError: sample 9 of dataset: it" in bad
    assert "rank(s) [1] could not prepare the next update step" in good


def test_packed_rows_ignore_what_samples_hold_besides_text_and_say_so_once(tiny_config):
    """As ``datasets.map`` leaves it behind."""
    plain = run_recipe(tiny_config(dataset=DATA, microbatching="packed"))
    samples = [{**s, "id": i, "prompt": "Why?"} for i, s in enumerate(tiny.make_samples(24))]
    config = tiny_config(dataset={"_component_": "tiny.samples_dataset"}, microbatching="packed")
    with tiny.samples_of_the_test(samples):
        logged, warnings = run_recipe_keeping_warnings(config)
    assert losses(logged) == losses(plain)
    told = [text for text in warnings if "ignored" in text]
    assert told == [
        "microbatching=packed: rows contain only text; id, prompt of samples is ignored"
    ]


# ---- Seeds -----------------------------------------------------------------------------------------


def test_the_order_of_samples_follows_its_own_seed(tiny_config):
    of = {
        (seed, data_seed): losses(run_recipe(tiny_config(seed=seed, data_seed=data_seed)))
        for seed, data_seed in ((0, 0), (1, 0), (0, 1))
    }
    assert of[0, 0] == losses(run_recipe(tiny_config()))
    assert of[1, 0] == of[0, 0]
    assert of[0, 1] != of[0, 0]


def test_going_on_with_another_order_is_refused(tiny_config):
    config, whole = stopped_after(4, tiny_config, data_seed=3)
    assert losses(run_recipe({**config, **RESUME})) == whole[4:]
    with pytest.raises(CheckpointError, match="data_seed=4: the checkpoint was saved with 3"):
        run_recipe({**config, **RESUME, "data_seed": 4})


# ---- What should not end a training ---------------------------------------------------------------


def test_a_log_that_cannot_be_written_is_told_once_and_training_goes_on(tiny_config):
    FailingLogger.num_lines = 0
    logger = {"_component_": "recipe_runs.FailingLogger"}
    logged, warnings = run_recipe_keeping_warnings(tiny_config(metric_logger=logger))
    assert len(logged) == 2
    told = [text for text in warnings if "metric_logger" in text]
    assert told == [
        "metric_logger: [Errno 28] No space left on device; training continues, further errors are not reported"
    ]


@pytest.mark.parametrize("key", ["lr_scheduler", "metric_logger", "profiler", "dataset_val"])
def test_a_component_that_the_command_line_sets_to_null_is_absent(key, tiny_config):
    """``KEY=null`` makes ``KEY._component_=null`` of a key that the YAML gives a component."""
    given = {
        "lr_scheduler": SCHEDULE,
        "metric_logger": {"_component_": "recipe_runs.ListLogger"},
        "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False},
        "dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 8},
    }
    config = tiny_config(**{key: {**given[key], "_component_": None}})
    expected = tiny_config(**{key: None})
    assert losses(run_recipe(config)) == losses(run_recipe(expected))


# ---- Files ----------------------------------------------------------------------------------------


def test_a_tilde_leads_home_and_makes_no_folder_of_that_name(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    config = tiny_config(max_steps_per_epoch=1)
    config["output_dir"] = "~/out"
    config["checkpointer"]["output_dir"] = "${output_dir}"
    run_recipe(config)
    assert (tmp_path / "home/out/epoch_0").is_dir()
    assert not (tmp_path / "~").exists()


def embedded_default(folder, vocab_size=300, **model):
    """Two update steps of it, with a small model and few of its texts."""
    config = OmegaConf.load(config_path("llama3_2/5M_full_update_step"))
    pairs = [(f"What does `f{i}` do?", f"It returns the item number {i}.") for i in range(80)]
    (folder / "docstrings.json").write_text(json.dumps(pairs))
    changes = {"embed_dim": 64, "intermediate_dim": 96, "num_layers": 2, **model}
    config.model.update({"vocab_size": vocab_size, "max_seq_len": 64, **changes})
    config.update({"output_dir": str(folder), "max_steps_per_epoch": 2})
    return OmegaConf.to_container(config)


def test_an_embedded_default_that_changed_in_its_folder_exports_the_model_that_was_trained(
    tmp_path,
):
    run_recipe(embedded_default(tmp_path, num_heads=8))
    config = embedded_default(tmp_path, vocab_size=290, num_heads=4, rope_base=20_000)
    with keep_messages() as messages:
        run_recipe(config)
    export = tmp_path / "epoch_0"
    described = json.loads((export / "config.json").read_text())
    assert described["num_attention_heads"] == 4
    assert described["rope_theta"] == 20_000
    assert described["vocab_size"] == 290
    assert len(json.loads((export / "tokenizer.json").read_text())["model"]["vocab"]) == 280
    assert not [path.name for path in export.iterdir() if path.name.startswith(".")]
    told = " ".join(messages)
    assert "model.num_heads is 4 and was 8" in told
    assert "vocab_size is 290 and was 300" in told

    transformers = pytest.importorskip("transformers")
    cfg = OmegaConf.create(config)
    checkpointer = FullModelHFCheckpointer(
        str(export), ["model-00001-of-00001.safetensors"], "LLAMA3_2", str(tmp_path / "unused")
    )
    model = instantiate(cfg.model)
    model.load_state_dict(checkpointer.load_checkpoint()["model"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export)
    tokens = torch.randint(280, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0, atol=1e-5)
