"""The notebook of a training: what it opens is closed on every way out, what it decides is decided once."""

import signal
import threading

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf
from recipe_runs import ListLogger, recipe_class

from recipe_utils.data.loader import UpdateStep
from recipe_utils.settings import ConfigError


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
