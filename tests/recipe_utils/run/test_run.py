"""The notebook of a training: what it opens is closed on every way out, what it decides is decided once."""

import signal
import threading

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from recipe_runs import ListLogger, keep_messages, recipe_class

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.settings.settings import ConfigError


@pytest.fixture
def started(tiny_config, monkeypatch):
    """A recipe that is ready to train in a process group of its own, and what its logger was told."""

    def start(**changes):
        cfg = OmegaConf.create(tiny_config(enable_async_checkpointing=True, **changes))
        recipe = recipe_class()(cfg)
        return recipe, cfg

    closed = []
    monkeypatch.setattr(ListLogger, "close", lambda self: closed.append(True))
    ListLogger.logged.clear()
    yield start, closed
    if dist.is_initialized():
        dist.destroy_process_group()


def fail(*_):
    raise ArithmeticError("planted")


@pytest.mark.parametrize("way_out", ["its end", "a stop", "an error in training", "in setup"])
def test_on_every_way_out_logger_writer_signals_and_process_groups_are_let_go(way_out, started):
    start, closed = started
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    changes = {"save_every_n_steps": 2}
    if way_out == "in setup":
        changes["checkpointer"] = {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": "/nowhere", "checkpoint_files": [], "model_type": "LLAMA3_2",
            "output_dir": "/tmp",
        }  # fmt: skip
    recipe, cfg = start(**changes)
    expected = {"an error in training": ArithmeticError, "in setup": ConfigError}.get(way_out)
    stopped = []
    try:
        with recipe.run:
            recipe.setup(cfg)
            stop = recipe.run.profiler.stop
            recipe.run.profiler.stop = lambda: (stopped.append(True), stop())
            if way_out == "an error in training":
                recipe.validate = recipe.update = fail
            if way_out == "a stop":
                recipe.run.stop.set()
            recipe.train()
        assert expected is None
    except (ArithmeticError, ConfigError) as error:
        assert type(error) is expected  # noqa: PT017
    was_open = way_out != "in setup"
    assert (closed, stopped) == ([True] * was_open, [True] * was_open)
    assert not dist.is_initialized()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert not [t for t in threading.enumerate() if t.name.startswith(("checkpoint", "prefetch"))]


def test_saves_and_exports_fall_due_within_an_epoch_but_not_at_its_end(started):
    start, _ = started
    recipe, _ = start(save_every_n_steps=2, save_every_n_minutes=1, export_every_n_steps=3)
    run = recipe.run
    step = UpdateStep(0, (), {}, 1)
    due = []
    for run.global_step in range(1, 7):
        due.append((run.should_save(step), run.should_export(step)))
    assert due == [(n % 2 == 0, n % 3 == 0) for n in range(1, 7)]
    last = UpdateStep(5, (), {}, 1, is_last_of_epoch=True)
    assert not run.should_save(last)
    assert not run.should_export(last)
    run.global_step = 7
    assert run.should_save(UpdateStep(0, (), {}, 1, clock_seconds=60.0))
    run._ranks.leave()


def test_only_asked_for_metrics_and_validations_are_logged(started):
    start, _ = started
    recipe, cfg = start(
        log_every_n_steps=2, metric_logger={"_component_": "recipe_runs.ListLogger"}
    )
    with recipe.run as run:
        recipe.setup(cfg)
        list(run.epochs())
        run.global_step = 4
        assert run.should_log()
        assert not run.should_validate()
        run.log(lr=0.5, grad_norm=None, num_nonfinite_steps=0)
        run.log(num_nonfinite_steps=2)
        run.log_validation(val_loss=1.5)
    assert ListLogger.logged == [
        {"step": 4, "lr": 0.5},
        {"step": 4, "num_nonfinite_steps": 2},
        {"step": 4, "val_loss": 1.5},
    ]


def test_metrics_that_are_still_on_their_way_are_written_before_all_that_follows(started):
    start, _ = started
    recipe, cfg = start(metric_logger={"_component_": "recipe_runs.ListLogger"})
    with recipe.run as run:
        run.reads_late = True
        recipe.setup(cfg)
        list(run.epochs())
        writes = [
            lambda: run.log_validation(val_loss=torch.tensor(1.5)),
            lambda: run.log_answers([]),
            lambda: run.save(recipe.model, recipe.optimizer),
            lambda: run.export(recipe.checkpointer, recipe.model, "export_step_3"),
        ]
        for global_step, write in enumerate(writes):
            run.global_step = global_step
            run.log(loss=torch.tensor(2.0))
            assert {"step": global_step, "loss": 2.0} not in ListLogger.logged
            write()
            assert {"step": global_step, "loss": 2.0} in ListLogger.logged
        run.global_step = 4
        run.log(loss=torch.tensor(3.0))
    assert ListLogger.logged[1:2] == [{"step": 0, "val_loss": 1.5}]
    assert ListLogger.logged[-1] == {"step": 4, "loss": 3.0}  # on the way out


def test_metrics_that_never_come_end_no_training_on_its_way_out(started):
    class Lost:
        def read(self):
            raise RuntimeError("the device is gone")

    start, closed = started
    recipe, cfg = start()
    with keep_messages() as messages, recipe.run as run:
        run.reads_late = True
        recipe.setup(cfg)
        list(run.epochs())
        run.global_step = 3
        run.log(loss=Lost())
    assert closed == [True]
    assert "update step 3: its metrics are lost (the device is gone)" in messages


def test_metrics_are_those_of_their_update_step_whatever_becomes_of_the_tensors(started):
    start, _ = started
    recipe, cfg = start(metric_logger={"_component_": "recipe_runs.ListLogger"})
    with recipe.run as run:
        run.reads_late = True
        recipe.setup(cfg)
        list(run.epochs())
        loss = torch.tensor(2.0)
        run.log(loss=loss, num_tokens=3)
        loss.zero_()
    assert ListLogger.logged == [{"step": 0, "loss": 2.0, "num_tokens": 3}]
