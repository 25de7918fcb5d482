"""State and output of a run: closed on every way out, one run per folder, metrics in order."""

import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import ListLogger, keep_messages, recipe_class

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.settings.problems import ConfigError

VAL = {"_component_": "tiny.tiny_dataset", "num_samples": 8, "seed": 5}


@pytest.fixture
def start(tiny_config):
    """Builds a recipe and its config."""

    def start(**changes):
        cfg = OmegaConf.create(tiny_config(enable_async_checkpointing=True, **changes))
        return recipe_class()(cfg), cfg

    ListLogger.logged.clear()
    return start


@pytest.fixture
def closed(monkeypatch):
    """Gets an item for each logger that is closed."""
    closed = []
    monkeypatch.setattr(ListLogger, "close", lambda self: closed.append(True))
    return closed


def fail(*_):
    raise ArithmeticError("planted")


@pytest.mark.parametrize("way_out", ["its end", "a stop", "an error in training", "in setup"])
def test_on_every_way_out_everything_is_closed_and_signals_are_restored(way_out, start, closed):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    recipe, cfg = start(save_every_n_steps=2)
    if way_out == "in setup":
        cfg.checkpointer.checkpoint_dir = "/nowhere"
    expected = {"an error in training": ArithmeticError, "in setup": ConfigError}.get(way_out)
    stopped = []
    try:
        with recipe.run:
            recipe.setup(cfg)
            stop = recipe.run.profiler.stop
            recipe.run.profiler.stop = lambda: (stopped.append(True), stop())
            if way_out == "an error in training":
                recipe.update = fail
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


def test_saves_and_exports_are_due_within_an_epoch_but_not_at_its_end(start):
    recipe, _ = start(save_every_n_steps=2, save_every_n_minutes=1, export_every_n_steps=3)
    run = recipe.run
    step = UpdateStep(0, (), {}, 1)
    due = []
    for run.global_step in range(1, 7):
        due.append((run.should_save(step), run.should_export(step)))
    assert due == [(n % 2 == 0, n % 3 == 0) for n in range(1, 7)]
    later = UpdateStep(0, (), {}, 1, clock_seconds=60.0)
    last = UpdateStep(5, (), {}, 1, is_last_of_epoch=True)
    assert not run.should_save(last)
    assert not run.should_export(last)
    run.global_step = 7
    assert not run.should_save(later)  # asking has not started the clock
    run._unsaved_since_seconds = 0.0
    assert run.should_save(later)


# ---- Log ----------------------------------------------------------------------------------------


def set_up(recipe, cfg):
    recipe.setup(cfg)
    recipe.run.metrics.reads_late = True
    list(recipe.run.epochs())


def log(recipe, loss, global_step, **metrics):
    recipe.run._step = UpdateStep(0, (), {}, 1)
    recipe.run.global_step = global_step
    recipe.run.log({"loss": loss}, recipe.nonfinite, 0.5, None, **metrics)


def lines():
    return [
        {k: v for k, v in line.items() if k != "data_wait_seconds"} for line in ListLogger.logged
    ]


def test_held_metrics_are_written_before_everything_that_follows(start):
    recipe, cfg = start(run_val_every_n_steps=1, dataset_val=VAL)
    with recipe.run as run:
        set_up(recipe, cfg)
        step = UpdateStep(0, (), {}, 1)
        follows = [
            lambda: run.stop_if_nonfinite(recipe.nonfinite, step),  # before a validation
            run.save,
            lambda: run.export("export_step_3"),
        ]
        for global_step, follow in enumerate(follows):
            log(recipe, torch.tensor(2.0), global_step, teacher_seconds=None)  # not logged
            assert global_step not in [line["step"] for line in ListLogger.logged]
            follow()
            assert lines()[-1] == {"step": global_step, "loss": 2.0, "lr": 0.5}
        loss = torch.tensor(3.0)
        log(recipe, loss, 4)
        loss.zero_()  # a later change of the tensor has no effect
    assert lines()[-1] == {"step": 4, "loss": 3.0, "lr": 0.5}


def test_an_error_of_the_device_does_not_prevent_the_closing(start, closed):
    recipe, cfg = start()
    with keep_messages() as messages, recipe.run as run:
        set_up(recipe, cfg)
        log(recipe, torch.tensor(2.0), 3)
        run.metrics._held = fail
    assert closed == [True]
    assert "metrics of the last update step are lost (planted)" in messages


# ---- One run per folder -------------------------------------------------------------------------


def start_second_run(config):
    cfg = OmegaConf.create(config)
    recipe = recipe_class()(cfg)
    with pytest.raises(ConfigError, match="another run writes to it"), recipe.run:
        recipe.setup(cfg)


def test_a_second_run_in_a_folder_in_use_deletes_nothing_of_the_first(start):
    first, cfg = start()
    with first.run:
        first.setup(cfg)
        parts = [Path(cfg.output_dir, name, "part") for name in ("step_5.tmp", "export.tmp")]
        for path in parts:
            path.parent.mkdir()
            path.write_text("in the making")
        run_distributed(start_second_run, 1, OmegaConf.to_container(cfg))
        assert all(path.exists() for path in parts)


def test_a_checkpoint_that_was_being_replaced_when_its_run_was_killed_is_resumed(start):
    first, cfg = start(save_every_n_steps=1, max_steps_per_epoch=2)
    with first.run:
        first.setup(cfg)
        first.train()
    for path in Path(cfg.output_dir).glob("step_*"):
        path.rename(path.with_name(path.name + ".old.tmp"))
    second, cfg = start(resume_from_checkpoint="auto", max_steps_per_epoch=2, epochs=2)
    with second.run:
        second.setup(cfg)
        assert second.run.global_step == 2
