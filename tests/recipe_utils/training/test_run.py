"""State and output of a run: closed on every way out, one run per folder, metrics in order."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import ListLogger, keep_messages, recipe_class

from recipe_utils.parallel.stop import Stop
from recipe_utils.settings.problems import ConfigError
from recipe_utils.training.resume import warnings_of

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
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
    handlers = [signal.getsignal(number) for number in numbers]
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
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert not [t for t in threading.enumerate() if t.name.startswith(("checkpoint", "prefetch"))]


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_hangup_requests_a_stop_unless_nohup_ignores_it(is_ignored):
    stop, handler = Stop(), signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    stop.listen()
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.is_set() is not is_ignored
    finally:
        stop.close()
        signal.signal(signal.SIGHUP, handler)


def test_checkpointing_and_exports_are_due_within_an_epoch_but_not_at_its_end(start):
    """By the clock a save is due after update steps 5 and 6, the last one of the epoch."""
    recipe, cfg = start(save_every_n_steps=2, save_every_n_minutes=1, export_every_n_steps=3, max_steps_per_epoch=6)
    done = []
    with recipe.run as run:
        recipe.setup(cfg)
        run.checkpointing.is_due_by_clock = lambda: run.global_step + 1 >= 5
        run.save = lambda: done.append(("save", run.global_step, run.state.epoch))
        run.export = lambda name: done.append((name, run.global_step, run.state.epoch))
        recipe.train()
    within = [("save", 2, 0), ("export_step_3", 3, 0), ("save", 4, 0), ("save", 5, 0)]
    assert done == [*within, ("epoch_0", 6, 0), ("save", 6, 1)]


def test_intervals_longer_than_the_training_are_reported(start):
    recipe, _ = start(
        run_val_every_n_steps=9,
        keep_best_checkpoint=True,
        dataset_val=VAL,
        save_every_n_steps=3,
        export_every_n_steps=4,
    )
    assert [text.split(":")[0] for text in recipe.run.settings.warnings(3)] == [
        "run_val_every_n_steps=9",
        "export_every_n_steps=4",
    ]


def test_random_numbers_of_a_router_are_reported_as_dropout_is(start):
    router = torch.nn.Linear(2, 2)
    router.jitter_noise, router.attn_dropout, router.drop_path = 0.01, 0.0, 0.1  # the last is drawn by crop
    (text,) = warnings_of(router, start()[0].run.settings)
    assert text.startswith("model.jitter_noise=0.01: noise depends on microbatches and ranks")


# ---- Log ----------------------------------------------------------------------------------------


def set_up(recipe, cfg):
    recipe.validate = lambda: {"val_loss": torch.tensor(1.0)}
    recipe.setup(cfg)
    recipe.run.metrics.late.is_late = True
    return recipe.run.steps(recipe.loader, "target_tokens")


def finish(recipe, steps, loss, **metrics):
    """Finishes the next update step without computing it."""
    recipe.run.finish(next(steps), {"loss": loss}, None, **metrics)


def test_held_metrics_are_written_before_everything_that_follows(start):
    recipe, cfg = start(run_val_every_n_steps=3, dataset_val=VAL)
    with recipe.run as run:
        steps = set_up(recipe, cfg)
        for follow in (run.save, lambda: run.export("export_step_2")):
            finish(recipe, steps, torch.tensor(2.0), teacher_seconds=None)  # not logged
            assert run.global_step not in [line["step"] for line in ListLogger.logged]
            follow()
            assert ListLogger.logged[-1]["step"] == run.global_step
            assert ListLogger.logged[-1].keys() >= {"loss", "lr", "num_tokens"}
            assert "teacher_seconds" not in ListLogger.logged[-1]
        assert ListLogger.logged[0] == {"step": 0, "val_loss": 1.0}
        finish(recipe, steps, torch.tensor(2.5))
        *_, trained, validated = ListLogger.logged
        assert (trained["step"], trained["loss"]) == (3, 2.5)
        assert validated == {"step": 3, "val_loss": 1.0}
        loss = torch.tensor(3.0)
        finish(recipe, steps, loss)
        loss.zero_()  # a later change of the tensor has no effect
    assert (ListLogger.logged[-1]["step"], ListLogger.logged[-1]["loss"]) == (4, 3.0)


def test_an_error_of_the_device_does_not_prevent_the_closing(start, closed):
    recipe, cfg = start()
    with keep_messages() as messages, recipe.run as run:
        finish(recipe, set_up(recipe, cfg), torch.tensor(2.0))
        run.metrics.late._held = fail
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
