"""An update step whose gradient is not finite never reaches the weights, on any rank."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import ListLogger, recipe_class
from torch.distributed.tensor import DTensor
from torchtune.utils import get_logger

from recipe_utils.run.log import read_metrics

DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 48}


def config_of(tiny_config, **changes):
    """Six update steps of 8 samples."""
    return tiny_config(
        **{
            "dataset": DATA,
            "batch_size": 2,
            "global_batch_size": 8,
            "gradient_accumulation_steps": ...,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01, "fused": True},
            **changes,
        }
    )


def metrics_file(config):
    return Path(config["output_dir"], "logs", "metrics.jsonl")


def everything(recipe):
    """Copies of all weights and of the optimizer's state on this rank."""
    state = recipe.optimizer.state_dict()["state"]
    tensors = [*recipe.model.parameters(), *(v for s in state.values() for v in s.values())]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [tensor.detach().clone() for tensor in local]


def run_with_spoilt_steps(config, spoilt, factor, reads_late=False):
    """The last rank's first microbatch of the update steps ``spoilt`` has its loss times ``factor``.

    Returns what was logged, the warnings, and for each update step whether it changed anything.
    """
    ListLogger.logged.clear()
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    get_logger().addHandler(handler)
    cfg = OmegaConf.create(config)
    recipe = recipe_class()(cfg)
    recipe.run.metrics.reads_late |= reads_late
    recipe.setup(cfg)
    sums, update = recipe.sums, recipe.update
    changed, to_spoil = [], []

    def spoilt_sums(microbatch):
        is_here = to_spoil and dist.get_rank() == dist.get_world_size() - 1
        return sums(microbatch) * (to_spoil.pop() if is_here else 1)

    def watched_update(step):
        to_spoil[:] = [factor] if recipe.run.global_step + 1 in spoilt else []
        before = everything(recipe)
        result = update(step)
        after = everything(recipe)
        # The first update step makes the optimizer's state, at the end of the list.
        changed.append(not all(map(torch.equal, before, after)))
        return result

    recipe.sums, recipe.update = spoilt_sums, watched_update
    try:
        with recipe.run:
            recipe.train()
    except RuntimeError as error:
        return str(error), warnings, changed
    return list(ListLogger.logged), warnings, changed


@pytest.mark.slow
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not-fused"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_skipped_step_changes_nothing_on_any_rank(world_size, fused, factor, tiny_config):
    config = config_of(
        tiny_config,
        on_nonfinite="skip",
        clip_grad_norm=1.0,
        optimizer={"_component_": "torch.optim.AdamW", "lr": 0.01, "fused": fused},
    )
    for logged, warnings, changed in run_distributed(
        run_with_spoilt_steps, world_size, config, [3, 5], factor
    ):
        assert changed == [True, True, False, True, False, True]
        if logged:  # rank 0
            left_out = [metrics.get("num_nonfinite_steps", 0) for metrics in logged]
            assert left_out == [0, 0, 1, 0, 1, 0]
            assert len([text for text in warnings if "they were skipped" in text]) == 2


def test_a_run_stops_with_a_checkpoint_of_untouched_weights(tiny_config):
    config = config_of(tiny_config)
    for error, _, changed in run_distributed(run_with_spoilt_steps, 2, config, [3], float("nan")):
        assert (
            "1 of the last 1 update steps up to 3 had a loss or gradient that is not finite"
            in error
        )
        assert "on_nonfinite=stop" in error
        assert changed == [True, True, False]
    resumed = {**config, "resume_from_checkpoint": True}
    (logged, _, changed), _ = run_distributed(run_with_spoilt_steps, 2, resumed, [], 1.0)
    assert [metrics["step"] for metrics in logged] == [4, 5, 6]
    assert all(changed)


@pytest.mark.slow
def test_too_many_in_a_row_stop_a_run_that_skips(tiny_config):
    config = config_of(tiny_config, on_nonfinite="skip", max_nonfinite_steps=2, log_every_n_steps=2)
    ((logged, _, changed),) = run_distributed(
        run_with_spoilt_steps, 1, config, [1, 2, 4, 5], float("nan")
    )
    assert [m.get("num_nonfinite_steps", 0) for m in logged] == [2, 1, 1]
    assert changed == [False, False, True, False, False, True]
    ((error, _, changed),) = run_distributed(
        run_with_spoilt_steps, 1, config, [2, 3, 4], float("nan")
    )
    assert "3 in a row, max_nonfinite_steps=2" in error
    assert changed == [True, False, False, False]


# ---- Where the device is behind the host --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_reads_late_stops_an_update_step_later(world_size, tiny_config):
    config = config_of(tiny_config)
    args = (run_with_spoilt_steps, world_size, config)
    for error, _, changed in run_distributed(*args, [3], float("nan"), True):
        assert "1 of the last 1 update steps up to 3 had a loss or gradient" in error
        assert changed == [True, True, False, True]
    assert [line["step"] for line in read_metrics(metrics_file(config))] == [1, 2, 3, 4]
    resumed = {**config, "resume_from_checkpoint": True}
    (logged, _, changed), *_ = run_distributed(
        run_with_spoilt_steps, world_size, resumed, [], 1.0, True
    )
    assert [metrics["step"] for metrics in logged] == [5, 6]
    assert all(changed)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"save_every_n_steps": 3}, {"max_steps_per_epoch": 3}])
def test_before_anything_is_left_on_the_disk_it_is_known(changes, tiny_config):
    config = config_of(tiny_config, **changes)
    ((error, _, changed),) = run_distributed(
        run_with_spoilt_steps, 1, config, [3], float("nan"), True
    )
    assert "1 of the last 1 update steps up to 3 had a loss or gradient" in error
    assert changed == [True, True, False]
    assert not Path(config["output_dir"], "epoch_0").exists()


@pytest.mark.slow
def test_what_is_left_out_is_counted_and_said_late_all_the_same(tiny_config):
    config = config_of(tiny_config, on_nonfinite="skip")
    ((logged, warnings, changed),) = run_distributed(
        run_with_spoilt_steps, 1, config, [3, 6], float("nan"), True
    )
    assert changed == [True, True, False, True, True, False]
    assert [m.get("num_nonfinite_steps", 0) for m in logged] == [0, 0, 1, 0, 0, 1]
    said = [text for text in warnings if "they were skipped" in text]
    assert ["up to 3" in said[0], "up to 6" in said[1], len(said)] == [True, True, 2]
