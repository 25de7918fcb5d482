"""Checkpoints are complete or not there, in the background or not, whatever fails."""

import random
import time

import checkpoint_runs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import RECIPE, build, files_of, killed_before_each_operation, save_once, state, train
from distributed_runs import run_distributed

from recipe_utils.checkpoint.folder import check_whole, find_newest_whole
from recipe_utils.checkpoint.load import load
from recipe_utils.checkpoint.save import CheckpointWriter
from recipe_utils.parallel.process_group import new_cpu_group


def save_and_go_on(folder, asynchronous):
    """Returns the outcomes on this rank; training continues while a checkpoint is written."""
    model, optimizer = build(shard=2, extra_numel=1 << 20)
    writer = CheckpointWriter(folder, group=new_cpu_group(), asynchronous=asynchronous)
    outcomes = []
    for step in (1, 2):
        train(model, optimizer, [step])
        # The same random numbers in both runs, and other ones on each rank.
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(100 * step + dist.get_rank())
        outcomes.append(writer.save(model, optimizer, state(step)))
        with torch.no_grad():
            model.extra.to_local().fill_(step)
    outcomes.append(writer.close())
    return [None if outcome is None else outcome.path.name for outcome in outcomes]


def test_saving_behind_the_training_gives_the_files_of_saving_before_it(tmp_path):
    at_once = run_distributed(save_and_go_on, 2, tmp_path / "sync", False)
    behind = run_distributed(save_and_go_on, 2, tmp_path / "async", True)
    assert at_once == [["step_1", "step_2", None]] * 2
    assert behind == [[None, "step_1", "step_2"]] * 2
    for step in ("step_1", "step_2"):
        files = files_of(tmp_path / "sync" / step)
        assert set(files) == {
            "rank_00000.safetensors", "rank_00001.safetensors",
            "tensors.json", "optimizer.json", "state.json", "complete.json",
        }  # fmt: skip
        assert files_of(tmp_path / "async" / step) == files
    assert files_of(tmp_path / "sync" / "step_1") != files


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_one_writer_saves_may_change_between_saves(tmp_path, asynchronous):
    model, optimizer = build()
    writer = CheckpointWriter(tmp_path, asynchronous=asynchronous)
    expected = []
    for step in range(3):  # the optimizer's state appears with the first update step
        writer.save(model, optimizer, state(step))
        expected.append(checkpoint_runs.contents(model, optimizer))
        train(model, optimizer, [step])
    writer.close()
    for step in range(3):
        resumed, resumed_optimizer = build(seed=1)
        load(tmp_path / f"step_{step}", resumed, resumed_optimizer, state(0))
        checkpoint_runs.assert_equal(checkpoint_runs.contents(resumed, resumed_optimizer), expected[step])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_saving_changes_nothing(tmp_path, optimizer):
    model, optim = build(optimizer)
    model.extra.grad = torch.ones(3)
    before = checkpoint_runs.contents(model, optim)
    random_state = torch.get_rng_state()
    CheckpointWriter(tmp_path).save(model, optim, state(0))
    checkpoint_runs.assert_equal(checkpoint_runs.contents(model, optim), before)
    assert torch.equal(model.extra.grad, torch.ones(3))
    assert all(p.grad is None for p in model.parameters() if p is not model.extra)
    assert not optim.state
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_newest_n_whole_checkpoints_are_kept(tmp_path):
    save_once(tmp_path, 9)  # of a run that went further; not older than what follows
    (tmp_path / "step_1").mkdir()  # a torn one
    save_once(tmp_path, 2)
    (tmp_path / "step_2" / "complete.json").write_text("{}")  # and another
    model, optimizer = build()
    writer = CheckpointWriter(tmp_path, keep_last_n=2)
    left = []
    for step in (3, 4, 5, 6):
        writer.save(model, optimizer, state(step))
        left.append({int(path.name[5:]) for path in tmp_path.iterdir()})
    assert left == [{1, 2, 9, 3}, {1, 2, 9, 3, 4}, {1, 2, 9, 4, 5}, {1, 2, 9, 5, 6}]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save_once(tmp_path, 1)
    before = files_of(tmp_path / "step_1")
    model, optimizer = build(seed=3)
    assert CheckpointWriter(tmp_path).save(model, optimizer, state(1)).path == tmp_path / "step_1"
    assert check_whole(tmp_path / "step_1", RECIPE) is None
    assert files_of(tmp_path / "step_1") != before
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def step_after_cleanup(folder):
    """Returns the step that a new run would resume from."""
    CheckpointWriter(folder)
    found, skipped = find_newest_whole(folder, RECIPE)
    assert found is not None
    assert skipped == []
    for path in folder.iterdir():
        assert path.suffix != ".tmp"
        checkpoint_runs.assert_whole(path)
    return int(found.name[5:])


def test_a_kill_before_any_file_operation_leaves_the_old_or_the_new_checkpoint_whole(tmp_path):
    found = []
    for folder in killed_before_each_operation(checkpoint_runs.save_and_die_at, tmp_path):
        found.append(step_after_cleanup(folder))
        load(folder / f"step_{found[-1]}", *build(seed=1), state(0))
    assert len(found) > 15
    assert found == sorted(found)
    assert {1, 2} == set(found)


def test_a_kill_of_one_rank_leaves_a_whole_checkpoint_and_no_rank_waiting(tmp_path):
    rng = random.Random(1)
    for attempt, rank in enumerate((0, 1)):
        folder = tmp_path / str(attempt)
        began = time.monotonic()
        results = run_distributed(
            checkpoint_runs.save_until_killed,
            2,
            folder,
            rng.uniform(0.1, 0.5),
            rank,
            timeout_seconds=60,
            expect_failures=True,
        )
        assert time.monotonic() - began < 40
        assert "died" in results[rank]
        step_after_cleanup(folder)
