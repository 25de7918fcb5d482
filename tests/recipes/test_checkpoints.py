"""A training that was ended anywhere resumes as if it had not been, on any number of ranks."""

import itertools
import logging
import os
import re
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.distributed as dist
from checkpoint_runs import flip_a_bit, resuming_in
from distributed_runs import run_distributed
from recipe_runs import (
    STEP_OF_8,
    ListLogger,
    call_in_step,
    cosine,
    exported_model,
    keep_messages,
    refusal,
    run_recipe,
    run_recipe_keeping_warnings,
    set_up,
    slow,
    writing_to,
)

from recipe_utils.checkpoint.folder import check_whole
from recipe_utils.settings.problems import ConfigError
from recipe_utils.training import checkpointing

DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 38}


def config_of(tiny_config, **changes):
    """Returns a config of two epochs of 5 update steps, the last with 6 samples; saves after step 3, 6 and 9."""
    return tiny_config(
        **{
            "dataset": DATA,
            "epochs": 2,
            "save_every_n_steps": 3,
            "keep_last_n_checkpoints": 9,
            "lr_scheduler": cosine(2),
            "microbatching": "packed",
            **STEP_OF_8,
            **changes,
        }
    )


ADAPTED = {"model": tiny.adapted(tiny.MODEL)}


@pytest.mark.parametrize(
    "changes",
    [
        {"export_dtype": "bf16", "export_every_n_steps": 4},
        slow(ADAPTED),
        slow({**ADAPTED, "save_adapter_weights_only": True, "export_dtype": "bf16"}),
    ],
)
def test_number_and_size_of_exports_are_logged_before_the_first_one(changes, tiny_config):
    config = config_of(tiny_config, **changes)
    with keep_messages() as messages:
        run_recipe(config)
    exports = [path for path in Path(config["output_dir"]).iterdir() if path.name.startswith(("epoch_", "export_"))]
    assert len(exports) == 2 + 2 * ("export_every_n_steps" in changes)
    files = [file for name in ("*.bin", "adapter/*.pt") for file in exports[0].glob(name)]
    size = sum(weight.nbytes for file in files for weight in torch.load(file).values())
    kept = "keep_last_n_exports=1 would keep the newest only"
    assert f"Exports: {len(exports)} of {size / 1e9:.3g} GB each; {kept}" in messages
    assert "No validation: run_val_every_n_steps is not set" in messages


def losses(logged):
    return [(metrics["step"], metrics["loss"]) for metrics in logged]


def saved(config):
    return sorted(path.name for path in Path(config["output_dir"]).glob("step_*"))


def keep_only(config, step):
    for path in Path(config["output_dir"]).glob("step_*"):
        if path.name != f"step_{step}":
            shutil.rmtree(path)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [(1, {"enable_async_checkpointing": True}), (2, {})],
    ids=["1-async", "2-sync"],
)
def test_it_resumes_bitwise_from_the_middle_and_from_the_end_of_an_epoch(world_size, changes, tiny_config):
    config = config_of(tiny_config, **changes)
    uninterrupted = losses(run_distributed(run_recipe, world_size, config)[0])
    assert [step for step, _ in uninterrupted] == list(range(1, 11))
    assert saved(config) == ["step_10", "step_3", "step_5", "step_6", "step_9"]
    final = exported_model(config).read_bytes()
    for step in (9, 5, 3):
        resumed = resuming_in(f"{config['output_dir']}_{step}", config)
        shutil.copytree(config["output_dir"], resumed["output_dir"])
        keep_only(resumed, step)
        logged = run_distributed(run_recipe, world_size, resumed)[0]
        assert losses(logged) == uninterrupted[step:]
        assert exported_model(resumed).read_bytes() == final


@pytest.mark.slow
def test_damaged_checkpoints_are_skipped_by_name_and_reason(tiny_config, tmp_path):
    """Each rank checks a share of the files: rank 1 alone finds the flipped bit."""
    config = config_of(tiny_config)
    uninterrupted = losses(run_distributed(run_recipe, 2, config)[0])
    keep_only(config, 3)
    for newer in ("step_4", "step_5"):
        shutil.copytree(tmp_path / "out" / "step_3", tmp_path / "out" / newer)
        flip_a_bit(tmp_path / "out" / newer / "rank_00000.safetensors")
    resumed = resuming_in(tmp_path / "out", config)
    ((logged, warnings), _) = run_distributed(run_recipe_keeping_warnings, 2, resumed)
    for newer in ("step_4", "step_5"):
        (warning,) = [text for text in warnings if newer in text]
        assert "skipped" in warning
        assert re.search(r"rank_00000.safetensors: its bytes are not those .*\(CRC-32\)", warning)
    assert losses(logged) == uninterrupted[3:]


USR1 = signal.SIGUSR1


def run_until_signalled(config, at_step, on_rank, *signals):
    """Sends signals, SIGTERM without any, to rank ``on_rank`` in its update step ``at_step``."""
    signals = signals or [signal.SIGTERM]
    with set_up(config) as recipe:
        if dist.get_rank() == on_rank:
            call_in_step(recipe, at_step, lambda: [os.kill(os.getpid(), each) for each in signals])
        recipe.train()
    return list(ListLogger.logged)


@pytest.mark.parametrize(
    ("changes", "signals"),
    [
        ({"prefetch_update_steps": 4}, [USR1, signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP]),
        slow({"prefetch_update_steps": 0, "enable_async_checkpointing": True}, []),
        slow({"pipeline_parallel_dim": 2}, [USR1]),
    ],
    ids=["prefetch", "async", "pipeline"],
)
def test_a_signal_to_one_rank_ends_all_after_the_same_step_with_a_checkpoint(changes, signals, tiny_config):
    config = config_of(tiny_config, save_every_n_steps=..., **changes)
    whole = writing_to(f"{config['output_dir']}_whole", config)
    uninterrupted = losses(run_distributed(run_recipe, 2, whole)[0])
    logged = losses(run_distributed(run_until_signalled, 2, config, 2, 1, *signals)[0])
    assert len(logged) == 2
    assert saved(config) == ["step_2"]
    resumed = losses(run_distributed(run_recipe, 2, {**config, "resume_from_checkpoint": True})[0])
    assert logged + resumed == uninterrupted


def run_with_signals_in_its_save(config):
    """Gets SIGTERM in update step 2, and more signals at each file that is then written."""
    numbers, fsync = itertools.cycle([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]), os.fsync

    def fsync_and_signal(file):
        os.kill(os.getpid(), next(numbers))
        fsync(file)

    with pytest.MonkeyPatch.context() as patches, set_up(config) as recipe:

        def start():
            patches.setattr(os, "fsync", fsync_and_signal)
            os.kill(os.getpid(), signal.SIGTERM)

        call_in_step(recipe, 2, start)
        recipe.train()


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
def test_further_signals_while_a_run_saves_do_not_undo_the_save(is_async, tiny_config):
    config = config_of(tiny_config, save_every_n_steps=..., enable_async_checkpointing=is_async)
    run_distributed(run_with_signals_in_its_save, 1, config)
    assert saved(config) == ["step_2"]
    assert check_whole(Path(config["output_dir"], "step_2")) is None


DRAWING = {"_component_": "tiny.drawing_dataset", "num_samples": 38}


@pytest.mark.parametrize("key", ["dataset", "dataset_val"])
def test_a_dataset_that_draws_beside_training_is_refused(key, tiny_config):
    data = {"dataset": DATA, "dataset_val": DATA, "run_val_every_n_steps": 1, key: DRAWING}
    assert f"num_workers=0: samples of {key} draw from a global" in refusal(tiny_config(**data))


def test_draws_of_a_dataset_are_repeated_after_a_resume_and_on_other_ranks(tiny_config):
    config = config_of(tiny_config, dataset=DRAWING, save_every_n_steps=..., num_workers=1, epochs=1, dtype="fp64")
    whole = writing_to(f"{config['output_dir']}_whole", {**config, "num_workers": 2})
    uninterrupted = losses(run_distributed(run_recipe, 2, whole)[0])
    logged = losses(run_distributed(run_until_signalled, 2, config, 2, 1)[0])
    resumed = losses(run_distributed(run_recipe, 2, {**config, "resume_from_checkpoint": True})[0])
    assert logged + resumed == uninterrupted
    (alone,) = run_distributed(run_recipe, 1, writing_to(f"{config['output_dir']}_alone", config))
    assert losses(alone) == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in uninterrupted]


def test_a_stop_saves_although_the_next_update_step_cannot_be_prepared(tiny_config):
    """Sample 20 belongs to update step 3 (not shuffled), which is prepared during update step 2."""
    bad = {"20": {"tokens": [], "labels": []}}
    config = config_of(tiny_config, save_every_n_steps=..., shuffle=False, dataset={**DATA, "replace": bad})
    assert len(run_distributed(run_until_signalled, 2, config, 2, 1)[0]) == 2
    assert saved(config) == ["step_2"]


def run_with_clock(config, seconds_per_step):
    """Runs with a clock of rank 0 that advances by so much per update step; others' are faster."""
    speed = 1 if dist.get_rank() == 0 else 10
    readings = itertools.count(10**6)
    checkpointing.time = SimpleNamespace(monotonic=lambda: speed * next(readings) * seconds_per_step)
    return run_recipe(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefetch", "changes", "expected"),
    [
        # A minute has passed at the third update step after the clock's first reading.
        (0, {"save_every_n_minutes": 1, "keep_last_n_checkpoints": 3}, [5, 9, 10]),
        (2, {"save_every_n_minutes": 1, "save_every_n_steps": 2}, [2, 4, 5, 6, 8, 10]),
        (0, {"save_every_n_minutes": 1000}, [5, 10]),
    ],
    ids=["minutes", "minutes-and-steps", "long"],
)
def test_it_saves_every_so_many_minutes_of_rank_0_on_all_ranks(prefetch, changes, expected, tiny_config):
    config = config_of(tiny_config, **{"save_every_n_steps": ..., "prefetch_update_steps": prefetch, **changes})
    run_distributed(run_with_clock, 2, config, 20)
    assert saved(config) == sorted(f"step_{step}" for step in expected)


def run_with_full_disk(config, method, at_step, rank, num_bytes):
    """Runs; after update step ``at_step``, ``rank`` cannot write larger files while ``method`` runs."""
    with keep_messages(logging.WARNING) as warnings, set_up(config) as recipe:
        unlimited = getattr(recipe.run, method)

        def limited(*args):
            if recipe.run.global_step != at_step or dist.get_rank() != rank:
                return unlimited(*args)
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, -1))
            result = unlimited(*args)
            recipe.run.checkpointing.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
            return result

        setattr(recipe.run, method, limited)
        recipe.train()
    return list(ListLogger.logged), warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "enable_async_checkpointing"), [(1, True), (2, False)], ids=["1-async", "2-sync"]
)
def test_a_full_disk_is_reported_and_training_continues_with_the_last_complete_checkpoint(
    world_size, enable_async_checkpointing, tiny_config
):
    config = config_of(tiny_config, enable_async_checkpointing=enable_async_checkpointing)
    ranks = run_distributed(run_with_full_disk, world_size, config, "save", 6, world_size - 1, 50_000)
    logged, warnings = ranks[0]
    assert len(logged) == 10
    (warning,) = [text for text in warnings if "no checkpoint could be saved" in text]
    start = f"update step 6: no checkpoint could be saved (rank {world_size - 1}: "
    assert warning.startswith(start)
    assert "File too large" in warning
    assert "the previous one is kept" in warning
    assert saved(config) == ["step_10", "step_3", "step_5", "step_9"]


@pytest.mark.slow
def test_an_export_that_cannot_be_written_is_made_by_resuming(tiny_config, tmp_path):
    config = config_of(tiny_config, save_every_n_steps=...)
    uninterrupted = writing_to(tmp_path / "whole", config)
    run_distributed(run_recipe, 2, uninterrupted)
    errors = run_distributed(run_with_full_disk, 2, config, "export", 10, 0, 50_000, expect_failures=True)
    for error in errors:
        assert "out/epoch_1: it could not be exported (" in error
        assert "resume_from_checkpoint=True exports the trained model" in error
    assert sorted(os.listdir(config["output_dir"])) == ["epoch_0", "logs", "step_10", "step_5"]
    resumed = run_distributed(run_recipe, 2, {**config, "resume_from_checkpoint": True})
    assert resumed[0] == []
    assert exported_model(config).read_bytes() == exported_model(uninterrupted).read_bytes()


def test_without_a_checkpoint_it_starts_from_scratch_only_with_auto(tiny_config):
    config = config_of(tiny_config, resume_from_checkpoint="auto", max_steps_per_epoch=2, epochs=1)
    (logged,) = run_distributed(run_recipe, 1, config)
    assert [step for step, _ in losses(logged)] == [1, 2]
    other = resuming_in(f"{config['output_dir']}_other", config)
    (error,) = run_distributed(run_recipe, 1, other, expect_failures=True)
    assert "resume_from_checkpoint=True: there is no checkpoint in" in error
    assert "set resume_from_checkpoint=auto" in error


def test_state_that_no_checkpoint_can_hold_is_refused_after_one_update_step(tiny_config):
    odd = {"_component_": "tiny.UnsavableSGD", "lr": 0.01, "first_step": 1}
    config = config_of(tiny_config, optimizer=odd)
    text = r"optimizer=UnsavableSGD: its state odd of \S+ is a object, which step .* set recipe_utils.optim"
    with pytest.raises(ConfigError, match=text):
        run_recipe(config)
    assert ListLogger.logged == []
    assert saved(config) == []
    saves_none = {**config, "epochs": 1, "save_every_n_steps": None}
    assert len(run_recipe(saves_none)) == 5


@pytest.mark.slow
def test_an_optimizer_whose_state_cannot_be_saved_does_not_end_the_training(tiny_config):
    """Its state cannot be saved from its fourth step on; it is checked after the first."""
    config = config_of(tiny_config, optimizer={"_component_": "tiny.UnsavableSGD", "lr": 0.01})
    ((logged, warnings),) = run_distributed(run_recipe_keeping_warnings, 1, config)
    assert len(logged) == 10
    assert saved(config) == ["step_3"]
    unsaved = [text for text in warnings if "no checkpoint could be saved" in text]
    assert all("UnsavableSGD" in text and "the previous one is kept" in text for text in unsaved)
    assert f"{len(unsaved)} checkpoints could not be saved, see above" in warnings
    assert exported_model(config).is_file()
