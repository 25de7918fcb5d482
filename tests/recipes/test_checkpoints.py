"""A training that was ended anywhere goes on as if it had not been, on any number of ranks."""

import itertools
import json
import os
import pickle
import re
import resource
import shutil
import signal
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.distributed as dist
from checkpoint_runs import Malicious
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import (
    ListLogger,
    keep_warnings,
    recipe_class,
    run_recipe,
    run_recipe_keeping_warnings,
    run_stock_recipe,
)
from torchtune.training import FullModelTorchTuneCheckpointer

from recipe_utils.data.loader import loader as update_steps

DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 38}
GLOBAL_BATCH = {"batch_size": 2, "global_batch_size": 8, "gradient_accumulation_steps": ...}


def config_of(tiny_config, **changes):
    """Two epochs of 5 update steps, the last of each with 6 samples; saved after step 3, 6 and 9."""
    schedule = {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 2,
    }
    return tiny_config(
        **{
            "dataset": DATA,
            "epochs": 2,
            "save_every_n_steps": 3,
            "keep_last_n_checkpoints": 9,
            "lr_scheduler": schedule,
            "microbatching": "packed",
            **GLOBAL_BATCH,
            **changes,
        }
    )


def losses(logged):
    return [(metrics["step"], metrics["loss"]) for metrics in logged]


def saved(config):
    return sorted(path.name for path in Path(config["output_dir"]).glob("step_*"))


def keep_only(config, step):
    for path in Path(config["output_dir"]).glob("step_*"):
        if path.name != f"step_{step}":
            shutil.rmtree(path)


@pytest.mark.parametrize("enable_async_checkpointing", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_it_goes_on_bitwise_from_the_middle_and_from_the_end_of_an_epoch(
    world_size, enable_async_checkpointing, tiny_config
):
    config = config_of(tiny_config, enable_async_checkpointing=enable_async_checkpointing)
    uninterrupted = losses(run_distributed(run_recipe, world_size, config)[0])
    assert [step for step, _ in uninterrupted] == list(range(1, 11))
    assert saved(config) == ["step_10", "step_3", "step_5", "step_6", "step_9"]
    weights = Path(config["output_dir"], "epoch_1").glob("*.bin")
    final = [path.read_bytes() for path in sorted(weights)]
    assert final
    for step in (9, 5, 3):
        resumed = resuming_in(f"{config['output_dir']}_{step}", config)
        shutil.copytree(config["output_dir"], resumed["output_dir"])
        keep_only(resumed, step)
        logged = run_distributed(run_recipe, world_size, resumed)[0]
        assert losses(logged) == uninterrupted[step:]
        weights = Path(resumed["output_dir"], "epoch_1").glob("*.bin")
        assert [path.read_bytes() for path in sorted(weights)] == final


LAYOUTS = {
    "1": (1, {}),
    "4": (4, {}),
    "hsdp-2x2": (4, {"data_parallel_replicate_dim": 2}),
    "in-order": (2, {"microbatching": "in_order", "batch_size": 1}),
}


@pytest.fixture(scope="module")
def saved_on_two_ranks(module_config, tmp_path_factory):
    """A config that was run on 2 ranks, its losses, and a copy of what was saved after step 3."""
    config = config_of(module_config)
    uninterrupted = losses(run_distributed(run_recipe, 2, config)[0])
    keep_only(config, 3)
    kept = tmp_path_factory.mktemp("two")
    shutil.copytree(Path(config["output_dir"], "step_3"), kept / "step_3")
    return config, uninterrupted, kept


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_or_plan_continues_the_same_curve(layout, saved_on_two_ranks, tmp_path):
    config, uninterrupted, kept = saved_on_two_ranks
    world_size, changes = LAYOUTS[layout]
    shutil.copytree(kept, tmp_path / "out")
    resumed = {
        **config,
        **changes,
        "output_dir": f"{tmp_path}/out",
        "checkpointer": {**config["checkpointer"], "output_dir": f"{tmp_path}/out"},
        "resume_from_checkpoint": True,
    }
    logged = losses(run_distributed(run_recipe, world_size, resumed)[0])
    assert [step for step, _ in logged] == list(range(4, 11))
    assert [loss for _, loss in logged] == pytest.approx(
        [loss for _, loss in uninterrupted[3:]], rel=1e-5
    )


CHANGED = {
    "num_samples=37: the checkpoint was saved with 38": {
        "dataset": {**DATA, "num_samples": 37},
    },
    "hash_of_samples=": {"dataset": {**DATA, "seed": 1}},
    "global_batch_size=4: the checkpoint was saved with 8": {"global_batch_size": 4},
    "shuffle=False: the checkpoint was saved with True": {"shuffle": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("expected", CHANGED)
def test_changed_data_is_refused_with_both_values_unless_asked_for(
    expected, saved_on_two_ranks, tmp_path
):
    config, _, kept = saved_on_two_ranks
    shutil.copytree(kept, tmp_path / "out")
    resumed = {
        **config,
        "output_dir": f"{tmp_path}/out",
        "checkpointer": {**config["checkpointer"], "output_dir": f"{tmp_path}/out"},
        "resume_from_checkpoint": True,
        **CHANGED[expected],
    }
    (error,) = run_distributed(run_recipe, 1, resumed, expect_failures=True)
    assert expected in error
    assert "resume_with_other_data=True" in error
    (logged,) = run_distributed(run_recipe, 1, {**resumed, "resume_with_other_data": True})
    assert logged[0]["step"] == 4


def resuming_in(folder, config):
    return {
        **config,
        "output_dir": f"{folder}",
        "checkpointer": {**config["checkpointer"], "output_dir": f"{folder}"},
        "resume_from_checkpoint": True,
    }


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def make_unreadable(file):
    """Whoever runs the tests may read everything, so a folder has to do."""
    file.unlink()
    file.mkdir()
    marker = json.loads((file.parent / "complete.json").read_text())
    marker["files"][file.name][0] = file.stat().st_size
    (file.parent / "complete.json").write_text(json.dumps(marker))


def of_another_recipe(file):
    marker = json.loads((file.parent / "complete.json").read_text())
    (file.parent / "complete.json").write_text(json.dumps({**marker, "recipe": "lora"}))


DAMAGES = {
    "truncated": (truncate, r"rank_00000.safetensors: it has \d+ bytes instead of \d+"),
    "flipped bit": (flip_a_bit, r"rank_00000.safetensors: its bytes are not those .*\(CRC-32\)"),
    "unreadable": (make_unreadable, "rank_00000.safetensors: Is a directory"),
    "another recipe": (of_another_recipe, "it is of recipe lora, this one is full_finetune_update"),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_foreign_checkpoints_are_passed_over_by_name_and_reason(
    damage, saved_on_two_ranks, tmp_path
):
    """Of what lies in two ranks' shares rank 1 alone reads the file that is damaged."""
    config, uninterrupted, kept = saved_on_two_ranks
    do, reason = DAMAGES[damage]
    shutil.copytree(kept, tmp_path / "out")
    for newer in ("step_4", "step_5"):
        shutil.copytree(kept / "step_3", tmp_path / "out" / newer)
        do(tmp_path / "out" / newer / "rank_00000.safetensors")
    resumed = resuming_in(tmp_path / "out", config)
    ((logged, warnings), _) = run_distributed(run_recipe_keeping_warnings, 2, resumed)
    for newer in ("step_4", "step_5"):
        (said,) = [text for text in warnings if newer in text]
        assert "skipped" in said
        assert re.search(reason, said)
    assert losses(logged) == uninterrupted[3:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank_00000.safetensors", "tensors.json", "state.json"])
def test_a_pickle_in_a_checkpoint_is_refused_unexecuted(name, saved_on_two_ranks, tmp_path):
    """Whoever put it there knows what a whole checkpoint's marker says."""
    config, _, kept = saved_on_two_ranks
    shutil.copytree(kept, tmp_path / "out")
    path = tmp_path / "out" / "step_3" / name
    path.write_bytes(pickle.dumps(Malicious(tmp_path / "crime")))
    marker = json.loads((path.parent / "complete.json").read_text())
    marker["files"][name] = [path.stat().st_size, zlib.crc32(path.read_bytes())]
    (path.parent / "complete.json").write_text(json.dumps(marker))
    resumed = resuming_in(tmp_path / "out", config)
    for error in run_distributed(run_recipe, 2, resumed, expect_failures=True):
        assert "CheckpointError" in error
        assert name in error
    assert not (tmp_path / "crime").exists()
    pickle.loads(path.read_bytes())
    assert (tmp_path / "crime").exists(), "the pickle is harmless"


@pytest.mark.slow
def test_where_every_checkpoint_is_damaged_it_does_not_start_anew_by_itself(
    saved_on_two_ranks, tmp_path
):
    config, _, kept = saved_on_two_ranks
    shutil.copytree(kept, tmp_path / "out")
    flip_a_bit(tmp_path / "out" / "step_3" / "state.json")
    resumed = resuming_in(tmp_path / "out", config)
    for error in run_distributed(run_recipe, 2, resumed, expect_failures=True):
        assert "step_3/state.json: its bytes" in error
        assert "resume_from_checkpoint=False starts from scratch" in error


MISFITS = {
    "model: .*step_3 does not fit it: .*mlp.w1.weight \\(48, 32\\) instead of \\(64, 32\\)": {
        "model": {**tiny.MODEL, "intermediate_dim": 64},
        "checkpoint_files": ["wider.pt"],
    },
    "torch.float32 instead of torch.bfloat16.*set model, dtype and weights_dtype as then": {
        "dtype": "bf16"
    },
    "optimizer=SGD: its options are": {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1}},
}


@pytest.mark.slow
@pytest.mark.parametrize("expected", MISFITS)
def test_a_checkpoint_that_does_not_fit_the_config_is_refused_with_both_values(
    expected, saved_on_two_ranks, tmp_path
):
    config, _, kept = saved_on_two_ranks
    shutil.copytree(kept, tmp_path / "out")
    changes = dict(MISFITS[expected])
    resumed = resuming_in(tmp_path / "out", config)
    if "checkpoint_files" in changes:
        resumed["checkpointer"] |= {
            "checkpoint_dir": f"{tmp_path}/weights",
            "checkpoint_files": changes.pop("checkpoint_files"),
        }
        (tmp_path / "weights").mkdir()
        torch.save(
            tiny.tiny_model(changes["model"]).state_dict(), tmp_path / "weights" / "wider.pt"
        )
    (error,) = run_distributed(run_recipe, 1, {**resumed, **changes}, expect_failures=True)
    assert re.search(expected, error)


def run_until_signalled(config, at_step, on_rank):
    """Rank ``on_rank`` gets a SIGTERM in its update step ``at_step``."""
    ListLogger.logged.clear()
    cfg = OmegaConf.create(config)
    recipe = recipe_class()(cfg)
    recipe.setup(cfg)
    update = recipe.update

    def signalled_update(*args, **kwargs):
        if recipe.run.global_step + 1 == at_step and dist.get_rank() == on_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*args, **kwargs)

    recipe.update = signalled_update
    with recipe.run:
        recipe.train()
    return list(ListLogger.logged)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_signal_to_one_rank_ends_all_after_the_same_step_with_a_checkpoint(prefetch, tiny_config):
    config = config_of(tiny_config, save_every_n_steps=..., prefetch_update_steps=prefetch)
    whole = config_of(tiny_config, save_every_n_steps=...)
    whole["output_dir"] += "_whole"
    whole["checkpointer"] = {**whole["checkpointer"], "output_dir": whole["output_dir"]}
    uninterrupted = losses(run_distributed(run_recipe, 2, whole)[0])
    logged = losses(run_distributed(run_until_signalled, 2, config, 1, 1)[0])
    assert 1 <= len(logged) <= 2 + prefetch + 1 < len(uninterrupted)
    assert saved(config) == [f"step_{len(logged)}"]
    resumed = losses(run_distributed(run_recipe, 2, {**config, "resume_from_checkpoint": True})[0])
    assert logged + resumed == uninterrupted


def run_with_clock(config, seconds_per_step):
    """Rank 0's clock goes by so much from one counted update step to the next, the others' faster."""
    speed = 1 if dist.get_rank() == 0 else 10
    readings = itertools.count(10**6)
    ours = {"monotonic_ns": lambda: int(speed * next(readings) * seconds_per_step * 1e9)}
    update_steps.time = SimpleNamespace(**ours)
    return run_recipe(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # A minute has gone by with the third update step after the one that the clock starts from.
        ({"save_every_n_minutes": 1}, [4, 5, 9, 10]),
        ({"save_every_n_minutes": 1, "save_every_n_steps": 2}, [2, 4, 5, 6, 8, 10]),
        ({"save_every_n_minutes": 1000}, [5, 10]),
    ],
    ids=["minutes", "minutes-and-steps", "long"],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_it_saves_every_so_many_minutes_of_rank_0_on_all_ranks(
    prefetch, changes, expected, tiny_config
):
    config = config_of(
        tiny_config, **{"save_every_n_steps": ..., "prefetch_update_steps": prefetch, **changes}
    )
    run_distributed(run_with_clock, 2, config, 20)
    assert saved(config) == sorted(f"step_{step}" for step in expected)


def run_with_full_disk(config, method, at_step, rank, num_bytes):
    """After update step ``at_step`` rank ``rank`` cannot write larger files while ``method`` runs."""
    cfg = OmegaConf.create(config)
    recipe = recipe_class()(cfg)
    recipe.setup(cfg)
    unlimited = getattr(recipe.run, method)

    def limited(*args):
        if recipe.run.global_step != at_step or dist.get_rank() != rank:
            return unlimited(*args)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, -1))
        result = unlimited(*args)
        recipe.run._report(recipe.run._checkpoints.wait())
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        return result

    setattr(recipe.run, method, limited)
    ListLogger.logged.clear()
    warnings = keep_warnings()
    with recipe.run:
        recipe.train()
    return list(ListLogger.logged), warnings


@pytest.mark.slow
@pytest.mark.parametrize("enable_async_checkpointing", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_is_said_and_the_training_goes_on_with_the_last_whole_checkpoint(
    world_size, enable_async_checkpointing, tiny_config
):
    config = config_of(tiny_config, enable_async_checkpointing=enable_async_checkpointing)
    ranks = run_distributed(
        run_with_full_disk, world_size, config, "save", 6, world_size - 1, 50_000
    )
    logged, warnings = ranks[0]
    assert len(logged) == 10
    (said,) = [text for text in warnings if "no checkpoint could be saved" in text]
    assert said.startswith(f"update step 6: no checkpoint could be saved (rank {world_size - 1}: ")
    assert "File too large" in said
    assert "the previous one is kept" in said
    assert saved(config) == ["step_10", "step_3", "step_5", "step_9"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_export_that_cannot_be_written_is_made_by_resuming(world_size, tiny_config, tmp_path):
    config = config_of(tiny_config, save_every_n_steps=...)
    shutil.copytree(Path(config["checkpointer"]["checkpoint_dir"]), tmp_path / "weights")
    uninterrupted = resuming_in(tmp_path / "whole", config)
    run_distributed(run_recipe, world_size, {**uninterrupted, "resume_from_checkpoint": False})
    errors = run_distributed(
        run_with_full_disk, world_size, config, "export", 10, 0, 50_000, expect_failures=True
    )
    for error in errors:
        assert "out/epoch_1: it could not be exported (" in error
        assert "resume_from_checkpoint=True exports the trained model" in error
    assert sorted(os.listdir(config["output_dir"])) == ["epoch_0", "logs", "step_10", "step_5"]
    resumed = run_distributed(run_recipe, world_size, {**config, "resume_from_checkpoint": True})
    assert resumed[0] == []
    (ours,) = Path(config["output_dir"], "epoch_1").glob("*.bin")
    (theirs,) = Path(uninterrupted["output_dir"], "epoch_1").glob("*.bin")
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_export_within_an_epoch_is_the_model_after_its_step(world_size, tiny_config, tmp_path):
    config = config_of(
        tiny_config, save_every_n_steps=..., export_every_n_steps=2, lr_scheduler=...
    )
    run_distributed(run_recipe, world_size, config)
    # Step 10 ends an epoch, which is exported as such.
    assert sorted(path.name for path in tmp_path.glob("out/e*")) == [
        "epoch_0", "epoch_1", *(f"export_step_{n}" for n in (2, 4, 6, 8))
    ]  # fmt: skip
    short = {**config, "max_steps_per_epoch": 4, "epochs": 1, "output_dir": f"{tmp_path}/short"}
    short["checkpointer"] = {**config["checkpointer"], "output_dir": short["output_dir"]}
    run_distributed(run_recipe, world_size, short)

    def load(folder):  # as stock recipes do
        files = ["model-00001-of-00001.bin"]
        checkpointer = FullModelTorchTuneCheckpointer(folder, files, "LLAMA3_2", f"{tmp_path}/none")
        return checkpointer.load_checkpoint()["model"]

    exported, expected = load(f"{tmp_path}/out/export_step_4"), load(f"{tmp_path}/short/epoch_0")
    assert exported.keys() == expected.keys()
    for name, weight in exported.items():
        assert torch.equal(weight, expected[name]), name


def test_with_nothing_to_resume_from_it_starts_anew_where_asked_to(tiny_config):
    config = config_of(tiny_config, resume_from_checkpoint="auto", max_steps_per_epoch=2, epochs=1)
    (logged,) = run_distributed(run_recipe, 1, config)
    assert [step for step, _ in losses(logged)] == [1, 2]
    config["resume_from_checkpoint"] = True
    config["output_dir"] = config["checkpointer"]["output_dir"] = config["output_dir"] + "_other"
    (error,) = run_distributed(run_recipe, 1, config, expect_failures=True)
    assert "resume_from_checkpoint=True: there is no checkpoint in" in error
    assert "set resume_from_checkpoint=auto" in error


@pytest.mark.slow
def test_an_optimizer_whose_state_cannot_be_saved_does_not_end_the_training(tiny_config):
    config = config_of(tiny_config, optimizer={"_component_": "tiny.UnsavableSGD", "lr": 0.01})
    ((logged, warnings),) = run_distributed(run_recipe_keeping_warnings, 1, config)
    assert len(logged) == 10
    assert saved(config) == []
    assert any(
        "no checkpoint could be saved" in text and "UnsavableSGD" in text for text in warnings
    )
    assert list(Path(config["output_dir"], "epoch_1").glob("*.bin"))


@pytest.mark.slow
def test_only_the_newest_checkpoints_are_kept(tiny_config):
    config = config_of(tiny_config, keep_last_n_checkpoints=2)
    run_distributed(run_recipe, 1, config)
    assert saved(config) == ["step_10", "step_9"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_it_goes_on_from_what_a_stock_recipe_has_saved(world_size, tiny_config):
    """32 samples in steps of 8, so that stock leaves none over."""
    config = tiny_config(
        dataset={**DATA, "num_samples": 32},
        loss={"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        epochs=2,
        max_steps_per_epoch=4,
        batch_size=4,
        gradient_accumulation_steps=2,
        optimizer_in_bwd=False,
        compile=False,
        resume_from_checkpoint=False,
        process_group_timeout_seconds=...,
    )
    stock = losses(run_distributed(run_stock_recipe, 1, config)[0])
    assert len(stock) == 8
    resumed = {
        **config,
        "resume_from_checkpoint": True,
        "global_batch_size": 8,
        "batch_size": 2,
        "checkpointer": {
            **config["checkpointer"],
            "checkpoint_files": ["epoch_0/model-00001-of-00001.bin"],
        },
    }
    del resumed["gradient_accumulation_steps"]
    logged = losses(run_distributed(run_recipe, world_size, resumed)[0])
    assert [step for step, _ in logged] == [5, 6, 7, 8]
    assert [loss for _, loss in logged] == pytest.approx(
        [float(loss) for _, loss in stock[4:]], rel=1e-4
    )
