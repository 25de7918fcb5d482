"""Bad input is refused before training, by the name of its key or sample; nothing is half-written."""

import os
from pathlib import Path

import pytest
import tiny
import torch
from checkpoint_runs import Malicious
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import recipe_class, run_recipe
from safetensors.torch import save_file

from recipe_utils.run.log import read_metrics


def refused(config):
    """The text of the error that the recipe raises before it trains."""
    cfg = OmegaConf.create(config)
    with pytest.raises(ValueError, match="problem") as error:
        recipe_class()(cfg).setup(cfg)
    return str(error.value)


def sample(**changes):
    return {"tokens": [1, 2, 3], "labels": [1, 2, 3]} | changes


def data(**more):
    return {"dataset": {"_component_": "tiny.tiny_dataset", "num_samples": 8, **more}}


BAD_CONFIGS = {
    "unknown key": (
        {"batchsize": 3},
        "batchsize: this recipe has no such key; did you mean batch_",
    ),
    "fp16": ({"dtype": "fp16"}, "dtype=fp16"),
    "no such dtype": ({"dtype": "fp8"}, "dtype=fp8"),
    "cuda without CUDA": ({"device": "cuda"}, "device=cuda"),
    "global batch": ({"global_batch_size": 7}, "batch_size=2 * 1 data-parallel ranks = 2"),
    "two batch sizes": (
        {"global_batch_size": 8, "gradient_accumulation_steps": 2},
        "batch_size=2 * gradient_accumulation_steps=2 * 1 data-parallel ranks = 4",
    ),
    "ranks": (
        {"data_parallel_replicate_dim": 2, "data_parallel_shard_dim": 3},
        "they make 6 ranks, but 1 run",
    ),
    "empty dataset": (
        {"dataset": {"_component_": "tiny.tiny_dataset", "num_samples": 0}},
        "0 samples",
    ),
    "no full step": (
        data() | {"last_update_step": "drop", "batch_size": 9},
        "8 samples do not fill one update step of 18 samples",
    ),
    "no dataset class": (
        {"dataset": {"_component_": "tiny.no_such"}},
        "dataset._component_=tiny.no_such: ",
    ),
    "plan": ({"microbatching": "at_random"}, "microbatching=at_random: unknown"),
    "budget in samples": ({"max_tokens_per_microbatch": 64}, "max_tokens_per_microbatch=64"),
    "no budget": (
        {"microbatching": "least_padding", "max_tokens_per_microbatch": 0},
        "max_tokens_per_microbatch=0: it must be at least 1",
    ),
    "packing with a collate function": (
        {"microbatching": "packed", "collate_fn": "tiny.collate_images"},
        "collate_fn=tiny.collate_images",
    ),
    "packing with attention of another kind": (
        {"microbatching": "packed", "model": tiny.GEMMA2_MODEL},
        "microbatching=packed: the model's Gemma2Attention",
    ),
    "packing compiled, without a length": (
        {
            "microbatching": "packed",
            "compile": True,
            "tokenizer": {"_component_": "tiny.tiny_tokenizer", "max_seq_len": None},
        },
        "without max_tokens_per_microbatch",
    ),
    "saving never": ({"save_every_n_steps": 0}, "save_every_n_steps=0: it must be at least 1"),
    "saving at words": (
        {"save_every_n_steps": "often"},
        "save_every_n_steps='often': it must be int >= 1 or null",
    ),
    "saving all the time": (
        {"save_every_n_minutes": 0},
        "save_every_n_minutes=0: it must be above 0",
    ),
    "not finite": ({"on_nonfinite": "hope"}, "on_nonfinite=hope: unknown"),
    "bad samples": ({"on_bad_sample": "mend"}, "on_bad_sample=mend: unknown"),
    "exporting never": (
        {"export_every_n_steps": 0},
        "export_every_n_steps=0: it must be at least 1",
    ),
    "keeping none": ({"keep_last_n_checkpoints": 0}, "keep_last_n_checkpoints=0"),
    "balance in order": ({"balance_over_ranks": True}, "balance_over_ranks=True"),
    "last step": ({"last_update_step": "repeat"}, "last_update_step=repeat: unknown"),
    "sync": ({"gradient_sync": "never"}, "gradient_sync=never: unknown"),
    "epochs": ({"epochs": 0}, "epochs=0: it must be at least 1"),
    "accumulation": ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
    "nothing to validate on": ({"run_val_every_n_steps": 2}, "set dataset_val, too"),
    "padding for inference": ({"collate_fn": "torchtune.data.left_pad_sequence"}, "collate_fn="),
    "in backward, accumulating": ({"optimizer_in_bwd": True}, "gradient_accumulation_steps=2"),
    "in backward, regrouped": (
        {
            "optimizer_in_bwd": True,
            "microbatching": "least_padding",
            "gradient_accumulation_steps": 1,
        },
        "microbatching=least_padding",
    ),
    "in backward, clipping": (
        {"optimizer_in_bwd": True, "clip_grad_norm": 1.0, "gradient_accumulation_steps": 1},
        "clip_grad_norm=1.0",
    ),
    "offloading": ({"enable_activation_offloading": True}, "it needs device=cuda"),
    "two kinds of recomputing": (
        {"enable_activation_checkpointing": True, "ac_mode": "full"},
        "ac_mode=full",
    ),
    "missing component": ({"optimizer": None}, "optimizer: it is missing"),
    "unreduced loss": (
        {"loss": {"_component_": "torch.nn.CrossEntropyLoss", "reduction": "none"}},
        "loss.reduction=none",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_config_is_refused_by_the_name_of_its_key(case, tiny_config, tmp_path):
    changes, expected = BAD_CONFIGS[case]
    assert expected in refused(tiny_config(**changes))
    assert not list(tmp_path.glob("out/*"))


def test_all_problems_are_raised_together(tiny_config):
    text = refused(tiny_config(dtype="fp16", epochs=0, batchsize=3, device="cuda"))
    for key in ("4 problems", "dtype=fp16", "epochs=0", "batchsize", "device=cuda"):
        assert key in text


def test_keys_of_the_users_own_are_fine_where_they_are_used(tiny_config):
    config = tiny_config(my_length=8)
    assert "my_length: this recipe has no such key" in refused(config)
    config["dataset"]["num_samples"] = "${my_length}"
    cfg = OmegaConf.create(config)
    recipe_class()(cfg).setup(cfg)


def test_a_missing_output_directory_is_named(tiny_config):
    config = tiny_config()
    del config["output_dir"]
    assert "output_dir: it is missing" in refused(config)


def test_a_missing_checkpoint_file_is_named(tiny_config):
    config = tiny_config()
    config["checkpointer"] = {**config["checkpointer"], "checkpoint_files": ["gone.pt"]}
    assert "checkpointer: No file with name: gone.pt" in refused(config)


def test_a_missing_checkpoint_directory_is_named(tiny_config):
    config = tiny_config()
    config["checkpointer"] = {**config["checkpointer"], "checkpoint_dir": "/nowhere"}
    assert "checkpointer: /nowhere is not a valid directory" in refused(config)
    config["checkpointer"]["_component_"] = "torchtune.training.FullModelHFCheckpointer"
    assert "No such file or directory: '/nowhere/config.json'" in refused(config)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("weights.pt", "truncated", "Invalid argument"),  # in PyTorch's words
        ("weights.pt", "unreadable", "Input/output error"),
        ("weights.safetensors", "truncated", "incomplete metadata, file not fully covered"),
        ("weights.safetensors", "unreadable", "No such device"),
    ],
)
def test_weights_that_cannot_be_read_are_named_with_the_reason(
    name, damage, reason, tiny_config, tmp_path
):
    path = tmp_path / "weights" / name
    path.parent.mkdir()
    weights = {key: w.clone() for key, w in tiny.tiny_model().state_dict().items()}
    save_file(weights, path) if path.suffix == ".safetensors" else torch.save(weights, path)
    if damage == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    else:  # whoever runs the tests may read every file; reading this one fails all the same
        path.unlink()
        path.symlink_to("/proc/self/mem")
    config = tiny_config()
    config["checkpointer"] |= {"checkpoint_dir": str(path.parent), "checkpoint_files": [name]}
    text = refused(config)
    assert f"checkpointer: Unable to load checkpoint from {path}" in text
    assert reason in text


def test_an_unwritable_output_directory_is_named(tiny_config, tmp_path):
    (tmp_path / "file").write_text("")
    config = tiny_config()
    config["output_dir"] = f"{tmp_path}/file/out"
    assert f"output_dir={tmp_path}/file/out: it cannot be written to" in refused(config)


def test_a_checkpoint_of_another_size_is_refused_before_training(tiny_config):
    cfg = OmegaConf.create(tiny_config(model={**tiny.MODEL, "intermediate_dim": 64}))
    with pytest.raises(ValueError, match=r"its shapes differ: layers.0.mlp.w1.weight \(48, 32\)"):
        recipe_class()(cfg).setup(cfg)


def with_recipe_state(tiny_config, state):
    """A config that resumes from a stock recipe's first epoch."""
    config = tiny_config(resume_from_checkpoint=True, epochs=2)
    files = {"checkpoint_files": ["epoch_0/weights.pt"]}
    config["checkpointer"] = {**config["checkpointer"], **files}
    out = Path(config["output_dir"])
    for folder in ("epoch_0", "recipe_state"):
        (out / folder).mkdir(parents=True)
    torch.save(tiny.tiny_model().state_dict(), out / "epoch_0" / "weights.pt")
    torch.save(state, out / "recipe_state" / "recipe_state.pt")
    return config


LORA_OPTIMIZER = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
STOCK_STATES = {
    "it has no max_steps_per_epoch, optimizer, seed": {"epochs_run": 1},
    "its optimizer steps 2 of this model's parameters, which are 20; it must be of a full": {
        "optimizer": LORA_OPTIMIZER, "epochs_run": 1, "seed": 0, "max_steps_per_epoch": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("expected", STOCK_STATES)
def test_the_state_of_another_stock_recipe_is_refused(expected, tiny_config):
    cfg = OmegaConf.create(with_recipe_state(tiny_config, STOCK_STATES[expected]))
    with pytest.raises(ValueError, match=f"checkpointer.recipe_checkpoint: {expected}"):
        recipe_class()(cfg).setup(cfg)


@pytest.mark.parametrize("place", ["weights", "recipe state"])
def test_a_pickle_that_would_execute_something_is_refused_unexecuted(place, tiny_config, tmp_path):
    crime = tmp_path / "crime"
    if place == "weights":
        path = tmp_path / "weights.pt"
        torch.save({"model": Malicious(crime)}, path)
        config = tiny_config()
        config["checkpointer"] |= {"checkpoint_dir": f"{tmp_path}", "checkpoint_files": [path.name]}
        config["checkpointer"]["output_dir"] = f"{tmp_path.parent}/{tmp_path.name}_out"
    else:
        config = with_recipe_state(tiny_config, {"optimizer": Malicious(crime)})
        path = tmp_path / "out" / "recipe_state" / "recipe_state.pt"
    text = refused(config)
    assert f"checkpointer: Unable to load checkpoint from {path}" in text
    assert "Weights only load failed" in text
    assert not crime.exists()
    torch.load(path, weights_only=False)
    assert crime.exists(), "the pickle is harmless"


BAD_SAMPLES = {
    "without labels": ({"tokens": [1, 2]}, "it has no 'labels'"),
    "fewer labels": (sample(labels=[1, 2]), "2 labels for 3 tokens"),
    "empty": ({"tokens": [], "labels": []}, "it has no tokens"),
    "too long": ({"tokens": [1] * 65, "labels": [1] * 65}, "65 tokens are more than the model's"),
    "label out of vocabulary": (sample(labels=[1, 67, 2]), "label 67 is outside"),
    "token out of vocabulary": (sample(tokens=[1, -1, 2]), "token -1 is outside"),
}


def train_into_error(config):
    with pytest.raises(ValueError, match="sample") as error:
        run_recipe(config)
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "num_workers"), [*((case, 0) for case in BAD_SAMPLES), ("empty", 1)]
)
def test_a_bad_sample_is_named_before_its_update_step(case, num_workers, tiny_config, tmp_path):
    bad, expected = BAD_SAMPLES[case]
    config = tiny_config(**data(replace={"5": bad}), num_workers=num_workers)
    (text,) = run_distributed(train_into_error, 1, config)
    assert "sample 5 of dataset" in text
    assert expected in text
    # Of the update step before it there are metrics; there is no checkpoint and no model.
    assert os.listdir(tmp_path / "out") == ["logs"]
    assert [line["step"] for line in read_metrics(tmp_path / "out/logs/metrics.jsonl")] == [1]
