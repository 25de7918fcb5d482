"""State and output of a run: closed on every way out, one run per folder, logs in the order of update steps."""

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


class Ready:
    """A recipe that is set up, at an update step of its own choice."""

    def __init__(self, recipe, cfg):
        self.run, self.recipe = recipe.run, recipe
        recipe.setup(cfg)
        list(self.run.epochs())

    def log(self, loss, global_step, **metrics):
        self.run._step = UpdateStep(0, (), {}, 1)
        self.run.global_step = global_step
        self.run.log({"loss": loss}, self.recipe.nonfinite, 0.5, None, **metrics)


LOGGED = {"metric_logger": {"_component_": "recipe_runs.ListLogger"}}


def without_figures(lines):
    return [{k: v for k, v in line.items() if k != "data_wait_seconds"} for line in lines]


def test_metrics_that_are_none_are_not_logged(started):
    start, _ = started
    recipe, cfg = start(log_every_n_steps=2, **LOGGED)
    with recipe.run as run:
        ready = Ready(recipe, cfg)
        ready.log(torch.tensor(2.0), 4, num_tokens=3, teacher_seconds=None)
        assert run.should_log()
        assert not run.should_validate()
        run.log_validation({"val_loss": torch.tensor(1.5)})
    assert without_figures(ListLogger.logged) == [
        {"step": 4, "loss": 2.0, "lr": 0.5, "num_tokens": 3},
        {"step": 4, "val_loss": 1.5},
    ]


def test_held_metrics_are_written_before_everything_that_follows(started):
    start, _ = started
    recipe, cfg = start(run_val_every_n_steps=1, **LOGGED, dataset_val=VAL)
    with recipe.run as run:
        run.metrics.reads_late = True
        ready = Ready(recipe, cfg)
        last = UpdateStep(0, (), {}, 1)
        models = recipe.model, recipe.optimizer
        follows = [
            lambda: run.stop_if_nonfinite(recipe.nonfinite, last, *models),  # before a validation
            lambda: run.save(*models),
            lambda: run.export(recipe.checkpointer, recipe.model, "export_step_3"),
        ]
        for global_step, follow in enumerate(follows):
            ready.log(torch.tensor(2.0), global_step)
            assert global_step not in [line["step"] for line in ListLogger.logged]
            follow()
            assert without_figures(ListLogger.logged)[-1] == {
                "step": global_step,
                "loss": 2.0,
                "lr": 0.5,
            }
        loss = torch.tensor(3.0)
        ready.log(loss, 4)
        loss.zero_()  # what becomes of the tensor does not matter
    assert without_figures(ListLogger.logged)[-1] == {"step": 4, "loss": 3.0, "lr": 0.5}


def test_metrics_that_are_lost_do_not_hide_the_way_out(started):
    class Lost:
        def synchronize(self):
            raise RuntimeError("the device is gone")

    start, closed = started
    recipe, cfg = start()
    with keep_messages() as messages, recipe.run as run:
        run.metrics.reads_late = True
        ready = Ready(recipe, cfg)
        ready.log(torch.tensor(2.0), 3)
        run.metrics._held = run.metrics._held._replace(arrived=Lost())
    assert closed == [True]
    assert "update step 3: its metrics are lost (the device is gone)" in messages


# ---- One run per folder -------------------------------------------------------------------------------


def start_second_run(config):
    cfg = OmegaConf.create(config)
    recipe = recipe_class()(cfg)
    with pytest.raises(ConfigError, match="another run writes to it"), recipe.run:
        recipe.setup(cfg)


def test_a_second_run_in_a_folder_in_use_deletes_nothing_of_the_first(started):
    start, _ = started
    first, cfg = start()
    with first.run:
        first.setup(cfg)
        parts = [Path(cfg.output_dir, name, "part") for name in ("step_5.tmp", "export.tmp")]
        for path in parts:
            path.parent.mkdir()
            path.write_text("in the making")
        run_distributed(start_second_run, 1, OmegaConf.to_container(cfg))
        assert all(path.exists() for path in parts)


def test_a_checkpoint_that_was_being_replaced_when_its_run_was_killed_is_resumed(started):
    start, _ = started
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
